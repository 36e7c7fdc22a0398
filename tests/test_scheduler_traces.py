"""The scheduler at work, step by step, as small texts in golden/scheduler: to be read, and compared with what runs now.

A change of the scheduler that changes a decision shows as a diff of a timeline. Where the new one is right, write the
texts anew with `python tests/test_scheduler_traces.py` and look at the diff.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from rig import Rig
from strategies import Ask

from slora_ref.request import BASE_MODEL, Sequence
from slora_ref.step import Step

GOLDEN = Path(__file__).parent / "golden" / "scheduler"
LEGEND = """\
How to read it. Requests are A, B, C, ... in order of arrival; adapters are x, y, z. The pool is drawn while the step
runs, one letter for two pages: a token of a request (its key and its value), or one of an adapter's ranks; a dot is
free. A letter under `runs` is a request that decodes one token; B1-5/8 computes tokens 1 to 5 of the 8 known of B.
C:x under `waits` waits for adapter x, which is not in the pool yet.
"""


class Timeline(Rig):
    """A rig that writes down each step.

    Args:
        tokens: size of the pool, in pairs of pages.
        options: as Rig.
    """

    def __init__(self, tokens: int, **options: object) -> None:
        super().__init__(2 * tokens, **options)
        self.settings = f"pool of {2 * tokens} pages, " + ", ".join(f"{k} {v}" for k, v in options.items())
        self.asked: list[str] = []
        self.lines = [f"step  pool{' ' * (tokens - 4)}  {'runs':<24}  {'waits':<14}  news"]
        self.news: list[str] = []
        self.there: set[int] = set()

    def letter(self, sequence: Sequence) -> str:
        """The name of a request."""
        return chr(ord("A") + sequence.number)

    def ask(self, ask: Ask) -> Sequence:
        """Adds a request and notes what it wants."""
        sequence = super().ask(ask)
        ends = "stops by itself" if ask.stops_after < ask.max_tokens else "ends by its length"
        text = f"{self.letter(sequence)}: prompt of {ask.prompt}, at most {ask.max_tokens} more, {ends}"
        text += f" after {ask.stops_after}" if ask.stops_after < ask.max_tokens else ""
        self.asked.append(text + ("" if ask.adapter is None else f"; adapter {'xyz'[ask.adapter]}"))
        self.news.append(f"{self.letter(sequence)} arrives")
        return sequence

    def step(self) -> Step:
        """Runs a step and writes its line."""
        number, self.drawn = self.steps + 1, ""
        self.alive_before = self.alive
        step = super().step()
        drawn = self.drawn or self.draw()
        runs = " ".join(self.run_of(work.sequence, work.start, work.count) for work in step.work)
        waits = " ".join(self.wait_of(s) for s in self.scheduler.waiting)
        self.news += [f"{self.letter(s)} starts" for s in self.last.admitted]
        self.news += [f"{self.letter(s)} gives way" for s in self.last.preempted]
        self.news += [f"{self.letter(s)} ends" for s in self.alive_before if s.finished]
        self.lines.append(f"{number:4}  {drawn}  {runs:<24}  {waits:<14}  {', '.join(self.news)}".rstrip())
        self.news = []
        return step

    def _compute(self, step: Step) -> None:
        super()._compute(step)
        self.drawn = self.draw()

    def draw(self) -> str:
        """The pool as it is now, by owner. Notes which adapters have come and gone since the last drawing."""
        there = set(self.prefetcher._pages)
        loading = self.prefetcher._loading.keys()
        self.news += [f"{'xyz'[i]} is evicted" for i in sorted(self.there - there)]
        self.news += [f"{'xyz'[i]} is being loaded" for i in sorted((there - self.there) & loading)]
        self.there = there
        owners = [self.letter(s) * s.computed for s in sorted(self.scheduler.running, key=lambda s: s.number)]
        owners += ["xyz"[i] * (self.prefetcher.pages_of(i) // 2) for i in sorted(there)]
        return "".join(owners).ljust(self.pool.num_pages // 2, ".")

    def run_of(self, sequence: Sequence, start: int, count: int) -> str:
        """A for a token of decoding, A1-5/8 for a piece of prefill."""
        known = self.last.known[sequence.number]
        decodes = count == 1 and start == known - 1 and start >= sequence.prompt_length
        return self.letter(sequence) + ("" if decodes else f"{start + 1}-{start + count}/{known}")

    def wait_of(self, sequence: Sequence) -> str:
        """A, or A:x while x is not there."""
        missing = sequence.adapter_id != BASE_MODEL and not self.prefetcher.is_resident(sequence.adapter_id)
        return self.letter(sequence) + (f":{'xyz'[sequence.adapter_id]}" if missing else "")

    def text(self, title: str, story: str) -> str:
        """The whole file."""
        paragraphs = [textwrap.fill(" ".join(part.split()), 120) for part in story.split("\n\n")]
        head = [title, "=" * len(title), "", *"\n\n".join(paragraphs).splitlines(), "", *LEGEND.splitlines(), ""]
        return "\n".join([*head, f"Settings: {self.settings}.", *self.asked, "", *self.lines]) + "\n"


# --- the scenarios: the name is the file's, the docstring its story ---


def iteration_level_scheduling() -> Timeline:
    """A request joins in the next step and leaves in the step in which it ends, whatever the others do (Orca).

    B comes while A decodes: its prompt is computed in the same step as A's next token. C is short and does not wait for
    the longer ones to end.
    """
    line = Timeline(24, max_running=4, max_batched_tokens=8)
    line.ask(Ask(None, 5, 8, 8))
    line.step()
    line.step()
    line.ask(Ask(None, 4, 5, 5))
    line.step()
    line.ask(Ask(None, 2, 2, 2))
    line.run_to_the_end(10)
    assert line.sequences[2].finished_at < line.sequences[0].finished_at
    return line


def chunked_prefill() -> Timeline:
    """A long prompt is cut, so that those that decode get a token in every step.

    A step has room for 7 tokens. A takes one of them, B's prompt of 20 what is left; C's prompt takes what B's last
    piece leaves.
    """
    line = Timeline(40, max_running=4, max_batched_tokens=7)
    line.ask(Ask(None, 3, 9, 9))
    line.step()
    line.ask(Ask(None, 20, 3, 3))
    line.ask(Ask(None, 5, 2, 2))
    line.run_to_the_end(12)
    assert line.sequences[0].finished_at == 9, "never stopped"
    return line


def a_claim_keeps_its_place() -> Timeline:
    """A request whose adapter is missing keeps its place, and others pass only into what is left.

    B needs x, which takes some steps to load. Until then x's pages and all the tokens that B will come to hold stay
    reserved. C fits beside them and passes. D would fit into the pages that are free now, but not beside B: when both
    are long, 14 + 6 + 15 are more than 32. So D waits, and E behind it. When x is there, B starts at once; now it is
    known that B ends before D is long, so D and E start too.
    """
    line = Timeline(32, ranks=[6], max_running=4, max_batched_tokens=16)
    line.loader.polls = {0: 4}
    line.ask(Ask(None, 3, 4, 4))
    line.step()
    b = line.ask(Ask(0, 10, 5, 5))
    line.ask(Ask(None, 2, 5, 5))
    d = line.ask(Ask(None, 4, 12, 12))
    line.ask(Ask(None, 2, 2, 2))
    line.run_to_the_end(25)
    assert b.finished_at < d.finished_at
    return line


def preemption_by_recompute() -> Timeline:
    """With admission = "expected" the newest gives way when the pool is full: its pages are freed, its tokens kept.

    A stops after two tokens, so B and C, which may take 8 and 10, are expected to stop soon as well and start together.
    They do not. In the step in which there are no pages for both, C gives way. When B has ended, C's prompt and all
    that C had generated are computed again in one step, and it goes on as if nothing had happened.
    """
    line = Timeline(20, max_running=4, max_batched_tokens=16, admission="expected")
    line.ask(Ask(None, 3, 9, 2))
    line.run_to_the_end(3)
    line.ask(Ask(None, 7, 8, 8))
    line.ask(Ask(None, 6, 10, 10))
    line.run_to_the_end(25)
    assert line.scheduler.preemptions == 1
    return line


def separate_prefill_and_joining_by_rounds() -> Timeline:
    """The paper's mode: a step is either prefill of new requests or decoding, with three steps of decoding at least
    between two prefills.

    B and C arrive while A decodes and wait for the next round; then their prefill stops A for a step. D joins at the
    round after that.
    """
    line = Timeline(40, max_running=4, max_batched_tokens=16, separate_prefill=True, join_every=3)
    line.ask(Ask(None, 4, 9, 9))
    line.step()
    line.ask(Ask(None, 5, 4, 4))
    line.ask(Ask(None, 3, 6, 6))
    for _ in range(4):
        line.step()
    line.ask(Ask(None, 2, 2, 2))
    line.run_to_the_end(20)
    return line


def eviction_of_idle_adapters() -> Timeline:
    """An adapter stays after its last request until its pages are wanted; the least recently used leaves first.

    x and y stay when A and B have ended. C finds x there: no load. D wants z, for which y must leave, as x was used
    later. E's long prompt wants pages, so the idle x leaves; E runs without it.
    """
    line = Timeline(24, ranks=[5, 6, 7], max_running=4, max_batched_tokens=16)
    for adapter in (0, 1):
        line.ask(Ask(adapter, 3, 2, 2))
        line.run_to_the_end(4)
    line.ask(Ask(0, 4, 2, 2))
    line.run_to_the_end(4)
    line.ask(Ask(2, 4, 4, 4))
    line.run_to_the_end(8)
    line.ask(Ask(None, 13, 3, 3))
    line.run_to_the_end(8)
    counts = line.prefetcher.counts
    assert (counts.loads, counts.hits, counts.evictions) == (3, 1, 2)
    return line


def a_full_adapter_table() -> Timeline:
    """At most two adapters at once: what needs a third waits for a slot, and only the base model passes.

    A and B hold the slots. C needs z and waits. D asks for x, which is there, but with D running x would stay longer,
    so D does not pass C; E needs no adapter and passes both. A ends, x leaves, z is loaded and C starts; D then waits
    for the slot of y.
    """
    line = Timeline(40, ranks=[2, 2, 2], max_running=6, max_batched_tokens=16, max_adapters=2)
    line.ask(Ask(0, 3, 4, 4))
    line.ask(Ask(1, 3, 8, 8))
    line.step()
    line.step()
    c = line.ask(Ask(2, 3, 3, 3))
    d = line.ask(Ask(0, 2, 2, 2))
    e = line.ask(Ask(None, 2, 2, 2))
    line.run_to_the_end(20)
    assert e.finished_at < c.finished_at < d.finished_at
    return line


SCENARIOS: list[Callable[[], Timeline]] = [
    iteration_level_scheduling,
    chunked_prefill,
    a_claim_keeps_its_place,
    preemption_by_recompute,
    separate_prefill_and_joining_by_rounds,
    eviction_of_idle_adapters,
    a_full_adapter_table,
]


def trace(scenario: Callable[[], Timeline]) -> str:
    """Runs a scenario; the text of its file."""
    return scenario().text(scenario.__name__.replace("_", " ").capitalize(), scenario.__doc__ or "")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_scheduler_decides_as_in_the_text(scenario: Callable[[], Timeline]) -> None:
    golden = (GOLDEN / f"{scenario.__name__}.txt").read_text(encoding="utf-8")
    assert trace(scenario) == golden, "python tests/test_scheduler_traces.py writes the texts anew"


def test_there_is_a_text_for_every_scenario_and_no_other() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {scenario.__name__ for scenario in SCENARIOS}


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for chosen in SCENARIOS:
        (GOLDEN / f"{chosen.__name__}.txt").write_text(trace(chosen), encoding="utf-8")
