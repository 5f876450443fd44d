"""The live view of a run: a bar, the loss with a small curve, and the figures of the last logged step.

Drawn by rich for ``dtrain train`` on a terminal and for ``dtrain watch``, or as plain lines. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dtrain.telemetry.progress import RunProgress, Saved, Skip
from dtrain.telemetry.texts import compact, duration, span

LONG_WAIT = 0.05
"""Fraction of a step above which the time that it waited for its batch is shown."""

_BARS, _ASCII_BARS = ("━", "╸", "─"), ("#", "#", "-")  # done, half done, to do
_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.,-=+*#"
_MIN_CURVE = 8  # characters
_PLAIN_CURVE = 40
_MIN_VALUE = 8  # characters, so that columns stay where they are
_GAP = 3  # blanks between two columns of figures
# what ipykernel sets for the commands of a notebook, whoever has started it
_NOTEBOOK = {"TERM": "xterm-color", "CLICOLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat"}

Figure = tuple[str, str]
"""A name and its value."""


@dataclass(frozen=True)
class LiveView:
    """State of a run at one time; a renderable of rich.

    Attributes:
        progress: from the logged lines.
        name: the title, without secrets and control characters.
        now: seconds since the epoch.
        saved: the last checkpoint, if any.
        status: what the run is doing, in words; empty if that is plain.
        style: the color of ``status``.
        is_running: whether time is left.
    """

    progress: RunProgress
    name: str
    now: float
    saved: Saved | None = None
    status: str = ""
    style: str = ""
    is_running: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            panel = self._panel(max(options.max_width - 4, 1), options.encoding if options.ascii_only else None)
        except Exception as error:  # a run does not end because its numbers cannot be shown
            yield Text(f"step {self.progress.step}; the view failed: {type(error).__name__}: {error}")
        else:
            yield panel

    def _panel(self, width: int, encoding: str | None) -> Panel:
        """Returns the view in a border.

        Args:
            width: inside of the border and its padding.
            encoding: of a terminal without Unicode.
        """
        ascii_only = encoding is not None
        lines = [self._bar(width, ascii_only)]
        if self.progress.loss.low <= self.progress.loss.high:
            lines.append(self._loss(width, ascii_only))
        lines += _grid(self.figures(), width) + _grid(self.events(), width)
        if self.progress.skip is not None:
            lines.append(Text(skip_text(self.progress.skip), style="yellow"))
        if self.status:
            lines.append(Text(self.status, style=self.style))
        title = Text(self.name)
        if encoding is not None:
            # each character stays one character, as the styles need it
            for line in (title, *lines):
                line.plain = line.plain.encode(encoding, "replace").decode(encoding)
        return Panel(Group(*lines), title=title if self.name else None, title_align="left", border_style="dim")

    def plain(self, *, ascii_only: bool) -> list[Figure]:
        """Returns all that the view shows as names and values, one for each line of a file."""
        progress = self.progress
        lines = [("run", self.name), ("state", self.status), ("step", self.step_text())]
        if progress.loss.low <= progress.loss.high:
            curve = sparkline(progress.loss.sampled(_PLAIN_CURVE), _ASCII_LEVELS if ascii_only else _LEVELS)
            lines.append(("loss", f"{self.loss_text()}  {curve}  {self._range()}"))
        lines += self.figures() + self.events()
        if progress.skip is not None:
            lines.append(("last skip", skip_text(progress.skip)))
        return [(name, value) for name, value in lines if value]

    def figures(self) -> list[Figure]:
        """Returns numbers of the last step beside its loss; what is unknown, or as it should be, is left out."""
        number = self.progress.number
        step_ms, wait_ms, scale = number("step_ms") or 0.0, number("data_wait_ms") or 0.0, number("loss_scale")
        skipped, memory = number("skipped_steps"), number("peak_memory")
        texts = {
            "lr": _format(number("lr"), "{:.2e}"),
            "grad_norm": _format(number("grad_norm"), "{:.3g}"),
            "loss_scale": _format(scale, "{:g}") if scale != 1.0 else "",
            self.progress.unit: compact(number("tokens")),
            f"{self.progress.unit}/s": compact(number("tokens_per_s")),
            "step time": _ms(number("step_ms")),
            "data_wait": _ms(wait_ms) if wait_ms > LONG_WAIT * step_ms else "",
            "peak memory": "" if memory is None else f"{memory / 2**30:.2f} GiB",
            "skipped": f"{skipped:.0f}" if skipped else "",
        }
        return [(name, text) for name, text in texts.items() if text]

    def events(self) -> list[Figure]:
        """Returns the last validation, the last checkpoint, and the slowest rank of the last comparison."""
        progress, number = self.progress, self.progress.number
        found = [
            (name, f"{_short(loss) or 'not finite'} at step {progress.validated_step}")
            for name, loss in progress.val_losses.items()
        ]
        if self.saved is not None:
            found.append(("checkpoint", f"step {self.saved.step}, {span(self.now - self.saved.saved_at)} ago"))
        rank, busy_ms, median_ms = map(number, ("slowest_rank", "busy_slowest_ms", "busy_median_ms"))
        if rank is not None and busy_ms is not None and median_ms is not None:
            found.append(("slowest rank", f"{rank:.0f}, {_ms(busy_ms)} (median {_ms(median_ms)})"))
        return found

    def _bar(self, width: int, ascii_only: bool) -> Text:
        total, step = self.progress.total_steps, self.progress.step
        text = f"step {self.step_text(blanks=2)}"
        room = width - cell_len(text) - 2
        if not total or room < _MIN_CURVE:
            return _cropped(Text(text), width)
        done, half, to_do = _ASCII_BARS if ascii_only else _BARS
        halves = min(2 * room, 2 * room * step // total)
        full = done * (halves // 2) + half * (halves % 2)
        color = "green" if step < total else "bold green"
        return Text.assemble((full, color), (to_do * (room - len(full)), "dim"), f"  {text}")

    def step_text(self, blanks: int = 1) -> str:
        total, step = self.progress.total_steps, self.progress.step
        if not total:
            return str(step)
        eta = self.progress.eta_s() if self.is_running else None
        parts = [f"{step}/{total}", f"{min(100, 100 * step // total)} %"]
        return (" " * blanks).join(parts + ([f"ETA {duration(eta)}"] if eta is not None else []))

    def _loss(self, width: int, ascii_only: bool) -> Text:
        last, bounds = self.loss_text(), self._range()
        room = width - len(f"loss {last}    {bounds}")
        if room < _MIN_CURVE:
            return _cropped(Text.assemble(("loss ", "dim"), (last, "bold")), width)
        curve = sparkline(self.progress.loss.sampled(room), _ASCII_LEVELS if ascii_only else _LEVELS)
        return Text.assemble(("loss ", "dim"), (last, "bold"), "  ", (curve, "cyan"), "  ", (bounds, "dim"))

    def loss_text(self) -> str:
        return _format(self.progress.number("loss"), "{:.4f}")

    def _range(self) -> str:
        return f"{_short(self.progress.loss.low)} to {_short(self.progress.loss.high)}"


def can_redraw(terminal: Console) -> bool:
    """Returns whether a text on ``terminal`` can be replaced: not in a file or a pipe, and not in a notebook.

    ``!command`` in a notebook runs on a pseudo-terminal, but its cell keeps what the moves of a cursor should erase.
    """
    in_notebook = all(os.environ.get(name) == value for name, value in _NOTEBOOK.items())
    return terminal.file.isatty() and not terminal.is_dumb_terminal and not in_notebook


def start_live(
    get_view: Callable[[], LiveView], terminal: Console, *, refreshes_per_s: float | None, transient: bool
) -> Live:
    """Starts to show a view at the end of a terminal, above which everything else is printed.

    Args:
        refreshes_per_s: by a thread, so that nobody waits for it; None: whoever calls ``refresh``.
        transient: whether the view is erased at the end.
    """
    live = Live(
        get_renderable=lambda: Group(get_view(), ""),  # the cursor is on an empty line, where ^C may be echoed
        console=terminal,
        auto_refresh=refreshes_per_s is not None,
        refresh_per_second=refreshes_per_s or 1,
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
    )
    live.start()
    terminal.show_cursor(True)  # the process may be killed at any time, and leaves the terminal as it is
    return live


def skip_text(skip: Skip) -> str:
    culprit = f", culprit: {skip.culprit}" if skip.culprit else ""
    return f"step {skip.step} skipped: {skip.reason}{culprit}"


def sparkline(values: Sequence[float], levels: str) -> str:
    """Returns a character for each value, from the first of ``levels`` for the lowest to the last for the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    extent = high / 2 - low / 2  # halves: the difference of two numbers may be infinite
    scale = (len(levels) - 1) / extent if extent > 0 else 0.0
    return "".join(levels[max(0, min(len(levels) - 1, round(_finite((v / 2 - low / 2) * scale))))] for v in values)


def _grid(figures: Sequence[Figure], width: int) -> list[Text]:
    """Returns the figures in as many columns as fit, names and values aligned."""
    for count in range(min(len(figures), max(1, width // _MIN_VALUE)), 0, -1):
        columns = [figures[column::count] for column in range(count)]
        names = [max(cell_len(name) for name, _ in column) for column in columns]
        values = [max(_MIN_VALUE, *(cell_len(value) for _, value in column)) for column in columns]
        if sum(names) + sum(values) + count + _GAP * (count - 1) <= width:
            break
    lines = []
    for start in range(0, len(figures), count) if figures else ():
        line = Text()
        for column, (name, value) in enumerate(figures[start : start + count]):
            line.append(f"{'' if column == 0 else ' ' * _GAP}{name:<{names[column]}} ", style="dim")
            line.append(f"{value:<{values[column]}}")
        line.rstrip()
        lines.append(_cropped(line, width))
    return lines


def _cropped(line: Text, width: int) -> Text:
    line.truncate(width, overflow="crop")
    line.no_wrap = True
    return line


def _format(number: float | None, template: str) -> str:
    """Formats a number, a very large one shortly; None is empty."""
    if number is None:
        return ""
    return template.format(number) if abs(number) < 1e12 else f"{number:.3g}"


def _ms(number: float | None) -> str:
    return _format(number, "{:.0f} ms")


def _short(number: float | None) -> str:
    return _format(number, "{:.4f}")


def _finite(number: float) -> float:
    return number if abs(number) < 1e9 else 0.0
