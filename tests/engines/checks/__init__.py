"""The checks of the matrix by subject; importing this package registers them."""

from tests.engines.checks import audits, checkpoints, float8, optimizers, skips, training, two_engines, weights  # noqa: F401
