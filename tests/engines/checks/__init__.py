"""The checks of the matrix by subject; importing this package registers them."""

from tests.engines.checks import optimizers  # noqa: F401
