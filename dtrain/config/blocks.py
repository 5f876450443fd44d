"""The keys of what is done to each block of a model: recompute its activations, compile it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtrain.config.fields import CheckedRecord, at_least, one_of, setting
from dtrain.errors import ConfigError

_PATTERNS = "auto or a list of name patterns of modules, such as [layers.*]"


@dataclass(frozen=True)
class Blocks(CheckedRecord):
    """Recomputation and compilation of the blocks of a model. See docs/scale/engine.md.

    Examples:
        >>> class Block(torch.nn.Linear):
        ...     def forward(self, x):
        ...         print("forward")
        ...         return super().forward(x)
        >>> engine = dtrain.initialize(torch.nn.Sequential(Block(4, 4)), blocks=dtrain.Blocks(recompute="full"))
        >>> engine.backward(engine(torch.ones(1, 4)).mean())
        forward
        forward
    """

    blocks: Any = setting(
        "auto",
        "Name patterns of the modules that are recomputed and compiled, each by itself; auto: each element of an "
        "outermost ModuleList or Sequential.",
        kind=str | list[str],
        what=_PATTERNS,
    )
    recompute: str = one_of(
        "none",
        "selective",
        "full",
        doc="Activations that backward recomputes instead of keeping them. full: all inside a block; selective: "
        "all but attention and every second matmul.",
    )
    recompute_every: int = at_least(1, 1, "Recompute every n-th block only, beginning with the first.")
    offload_activations: bool = setting(
        False, "recompute=full: keep the inputs of recomputed blocks in host memory until backward."
    )
    compile: str = one_of(
        "none",
        "blocks",
        "auto",
        doc="Run each block as code of torch.compile in training, which takes seconds at the start; auto: on a GPU, "
        "if a measurement of the first block shows that it is faster.",
    )

    def _check(self) -> None:
        if isinstance(self.blocks, str) and self.blocks != "auto":
            raise ConfigError(f"{self._entry('blocks')} must be {_PATTERNS}")
        if self.recompute_every > 1 and self.recompute == "none":
            raise ConfigError(
                f"{self._entry('recompute_every')} with {self._key('recompute')}=none recomputes nothing; set "
                f"{self._key('recompute')}=full or selective, or remove it"
            )
        if self.offload_activations and self.recompute != "full":
            raise ConfigError(
                f"{self._entry('offload_activations')} keeps the inputs of recomputed blocks on the host, so it needs "
                f"{self._key('recompute')}=full; {self._entry('recompute')}"
            )
        if self.offload_activations and self.compile != "none":
            raise ConfigError(
                f"{self._entry('offload_activations')} with {self._entry('compile')}: compiled code keeps weights and "
                f"activations in one set, and the weights would be copied too; set {self._key('compile')}=none"
            )

    @property
    def is_used(self) -> bool:
        """Whether anything is done to the blocks."""
        return self.recompute != "none" or self.compile != "none"
