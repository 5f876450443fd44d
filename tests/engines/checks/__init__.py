"""The checks of the matrix by subject; importing this package registers them."""

from tests.engines.checks import (  # noqa: F401
    audits,
    checkpoints,
    float8,
    gradients,
    missing_gradients,
    modules,
    optimizers,
    reads,
    shadow,
    skips,
    training,
    two_engines,
    weights,
)
