"""The order of samples of an epoch, drawn again when a run resumes inside it.

A sampler draws an epoch's order from a random state that a checkpoint in the middle of the epoch no longer has: it is
saved after it was used. So each sampler remembers the states with which its last order began. An order that is drawn
again leaves torch's random state as it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import GradientState
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

State = dict[str, Any]


class ReplayedSampler(Sampler[Any]):
    """Gives the samples of ``sampler`` in its order, which can be drawn again. Other attributes are the sampler's.

    Args:
        sampler: draws an order when its iteration begins.
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler
        self.begun: State | None = None  # random states at the start of the last iteration
        self._replay: tuple[State, Tensor] | None = None  # states for the next one, and torch's after its first draw

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # before it is set
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # a Sampler without a length raises

    def states(self) -> State:
        """Returns the random states from which the next order is drawn: torch's, and the sampler's own if any."""
        generator = getattr(self.sampler, "generator", None)
        return {
            "torch": _text(torch.get_rng_state()),
            "generator": None if generator is None else _text(generator.get_state()),
        }

    def restore_generator(self, states: State) -> None:
        """Gives the sampler's own generator, if it has one, the state that it had."""
        generator = getattr(self.sampler, "generator", None)
        if generator is not None and states["generator"] is not None:
            generator.set_state(_tensor(states["generator"]))

    def replay(self, states: State) -> None:
        """Lets the next iteration begin with ``states``, and torch's random state then be what it is now."""
        self._replay = states, torch.get_rng_state()

    def __iter__(self) -> Iterator[Any]:
        replay, self._replay = self._replay, None
        if replay is not None:
            self.restore_generator(replay[0])
            torch.set_rng_state(_tensor(replay[0]["torch"]))
        self.begun = self.states()
        samples = iter(self.sampler)
        first = next(samples, self)  # samplers draw here
        if replay is not None:
            torch.set_rng_state(replay[1])
        if first is not self:
            yield first
            yield from samples


def make_replayable(loader: Any) -> None:
    """Lets the random order of a prepared loader be drawn again."""
    holder, sampler = _holder(loader), _sampler(loader)
    if isinstance(sampler, Sampler) and not isinstance(sampler, ReplayedSampler):
        holder.sampler = ReplayedSampler(sampler)


def orders(loaders: Sequence[Any]) -> list[State]:
    """Returns what each loader needs to continue: its epoch, and the states that draw the order of its samples."""
    active = [one for one in GradientState().dataloader_references if one is not None]
    found = []
    for loader in loaders:
        sampler = _sampler(loader)
        current = next((one for one in active if one is loader or (sampler and _sampler(one) is sampler)), None)
        is_inside = current is not None and not current.end_of_dataloader
        epoch = getattr(loader if current is None else current, "iteration", 0)
        state: State = {"epoch": epoch + (current is not None and not is_inside), "is_inside": is_inside}
        if isinstance(sampler, ReplayedSampler):
            state["states"] = sampler.begun if is_inside else sampler.states()
            state["seed"] = getattr(sampler, "initial_seed", None)  # of accelerate's SeedableRandomSampler
        found.append(state)
    return found


def restore_orders(loaders: Sequence[Any], states: Sequence[State]) -> None:
    """Lets the loaders continue with what ``orders`` returned; call it when random states are restored."""
    for loader, state in zip(loaders, states, strict=False):
        sampler = _sampler(loader)
        loader.iteration = state["epoch"]
        if isinstance(sampler, ReplayedSampler) and state.get("states"):
            (sampler.replay if state["is_inside"] else sampler.restore_generator)(state["states"])
            if isinstance(sampler.sampler, SeedableRandomSampler) and state["seed"] is not None:
                sampler.sampler.initial_seed = state["seed"]


def count_epoch(part: Any, loader: Any) -> Any:
    """Returns ``part``, which skips the first batches of ``loader``, and which at its end counts as an epoch of it."""
    if not (hasattr(part, "iteration") and hasattr(loader, "iteration")):  # it is not prepared
        return part
    end = part.end

    def ended() -> None:
        end()
        loader.iteration = part.iteration

    part.end = ended
    return part


def _holder(loader: Any) -> Any:
    """Returns the innermost batch sampler, which has the sampler; None if there is none."""
    holder = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(holder, "batch_sampler"):
        holder = holder.batch_sampler
    return holder if hasattr(holder, "sampler") else None


def _sampler(loader: Any) -> Any:
    return getattr(_holder(loader), "sampler", None)


def _text(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
