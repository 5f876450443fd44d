"""The checks of the matrix by subject; importing this package registers them."""

from tests.engines.checks import audits, checkpoints, float8, missing_gradients, optimizers, skips  # noqa: F401, I001
from tests.engines.checks import training, two_engines, weights  # noqa: F401
