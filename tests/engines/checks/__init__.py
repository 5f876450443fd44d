"""The checks of the matrix by subject; importing this package registers them."""

from tests.engines.checks import (  # noqa: F401
    audits,
    checkpoints,
    float8,
    missing_gradients,
    modules,
    gradients,
    optimizers,
    skips,
    training,
    two_engines,
    weights,
)
