"""Who keeps the others waiting: named when certain, never wrongly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.observe.late_findings import LateFinding
from rankscope.backends.observe.late_patterns import Pattern
from rankscope.backends.observe.lateness import GroupLateness, Lateness
from rankscope.backends.observe.speeds import CLASSES, Speeds
from rankscope.backends.work.record_fields import UNSEEN
from rankscope.widgets.lateness_text import lateness_text
from tests.backends.observe.late_runs import START, Run

#: What happened → rank → when it entered and left each all_reduce, in µs.
RECORDED = json.loads(
    Path(__file__).with_name("recorded_noise.json").read_text(encoding="utf-8")
)

#: Steps of a run: the first op has none before it, and is not judged.
TWENTY = 21


def _found(
    run: Run, hosts: dict[int, str] | None = None, *, ended: bool = False
) -> list[LateFinding]:
    lateness = Lateness(ended=ended)
    lateness.take(run.dumps(), hosts=hosts or {})
    return lateness.findings()


def _names(run: Run) -> list[tuple[Pattern, tuple[int, ...]]]:
    return [(one.pattern, one.ranks) for one in _found(run)]


class TestNoise:
    """Scheduling noise is not a straggler."""

    def test_nobody_is_named_in_a_thousand_healthy_runs(self) -> None:
        for seed in range(1000):
            rng = random.Random(seed)
            ranks, work = rng.choice((2, 3, 4, 8)), rng.choice((0.0, 1.0, 10.0))
            run = Run(ranks, seed, heavy=rng.choice((0.3, 1.0, 3.0)))
            run.steps(26, lambda n, rank, work=work: work)  # type: ignore[misc]
            assert not _found(run), (seed, ranks, work)
            assert not _found(run, ended=True), (seed, ranks, work)

    def test_nor_in_long_ones_at_any_moment(self) -> None:
        for seed in range(20):
            run, lateness = Run(2 + seed % 4, seed), Lateness()
            for _ in range(10):
                run.steps(15)
                lateness.take(run.dumps(last=30))
                assert not lateness.findings(), seed

    def test_a_scheduler_that_keeps_a_rank_behind_most_of_the_time(self) -> None:
        # As recorded of two ranks beside three busy processes: rank 1 last in 48 of 60.
        run, rng = Run(2, heavy=0.1), random.Random(1)
        run.steps(121, lambda n, rank: 5.0 if (rng.random() < 0.75) == rank else 1.0)
        assert not _found(run)

    def test_a_scheduler_that_keeps_a_rank_behind_for_twenty_ops(self) -> None:
        for seed in range(20):
            run, rng, lateness = Run(seed=seed), random.Random(seed), Lateness()
            for _ in range(6):
                held, ms = rng.randrange(4), rng.choice((4, 8, 16))

                def work(n: int, rank: int) -> float:
                    return 3 + ms * rng.random() * (rank == held)  # noqa: B023

                for _ in range(4):
                    run.steps(5, work)
                    lateness.take(run.dumps(last=30))
                    assert not lateness.findings(), seed

    def test_a_scheduler_that_keeps_a_rank_behind_for_many_short_ops(self) -> None:
        # A burst of 0.3 s: 130 ops of a loop that does nothing else.
        for seed in range(20):
            run, rng = Run(2, seed, heavy=0.02), random.Random(seed)

            def work(n: int, rank: int, rng: random.Random = rng) -> float:
                return 0.1 + 4 * rng.random() ** 2 * (rank == 1)

            assert not _found(run.steps(130, work)), seed

    def test_who_is_late_for_no_longer_than_others_were(self) -> None:
        for seed in range(10):
            run, lateness = Run(4, seed, heavy=0.3), Lateness()
            for turn, held in enumerate((1, 3, 0)):
                run.steps(24, lambda n, r: 3 + 8 * (r == held))  # noqa: B023
                lateness.take(run.dumps(last=40))
                # The first one may be late from now on; then, ranks change.
                found = [one.ranks for one in lateness.findings()]
                assert found == ([] if turn else [(1,)]), seed

    def test_pauses_that_each_rank_makes_on_its_own_are_no_turns(self) -> None:
        # As a garbage collector's, of the same period and of another beginning.
        run, rng = Run(16, heavy=0.1), random.Random(1)
        begins = [rng.randrange(7) for _ in range(16)]

        def work(n: int, rank: int) -> float:
            return 2 + 30 * (n % 7 == begins[rank])

        assert not _found(run.steps(61, work))

    @pytest.mark.parametrize("which", RECORDED)
    def test_recorded_runs_on_two_cores(self, which: str) -> None:
        run = Run(len(RECORDED[which]))
        for rank, times in enumerate(RECORDED[which]):
            for entered, left in times:
                run.add(rank, "all_reduce", entered / 1000, left / 1000)
        for count in (22, 62, 122):
            for first in range(0, 123 - count):
                dumps = run.dumps()
                for dump in dumps.values():
                    dump["records"] = dump["records"][first : first + count]
                for ended in (False, True):
                    lateness = Lateness(ended=ended)
                    lateness.take(dumps)
                    assert lateness.groups()
                    assert not lateness.findings()

    def test_work_that_changes_for_all_ranks_alike(self) -> None:
        assert not _found(Run().steps(61, lambda n, rank: 40.0 if n % 5 else 1.0))


#: Where sleeps are, in units → what is to be found.
INJECTED = pytest.mark.parametrize(
    ("work", "pattern", "ranks"),
    [
        (lambda n, rank: rank == 2, Pattern.STEADY, {2}),
        (lambda n, rank: rank in (1, 3), Pattern.STEADY, {1, 3}),
        (lambda n, rank: {1: 3, 3: 5}.get(rank, 0), Pattern.STEADY, {1, 3}),
        (lambda n, rank: rank == n % 4, Pattern.TURNS, {0, 1, 2, 3}),
        (lambda n, rank: rank, Pattern.UNEVEN, {3}),
    ],
    ids=["one", "two", "two_amounts", "turns", "uneven"],
)


class TestInjected:
    """A sleep on a rank, on two, in turns; uneven work: named within 20 ops."""

    @pytest.mark.parametrize("ms", [10, 50])
    @INJECTED
    def test_a_long_one(
        self,
        ms: int,
        work: Callable[[int, int], int],
        pattern: Pattern,
        ranks: set[int],
    ) -> None:
        named = 0
        for seed in range(30):
            run = Run(4, seed).steps(TWENTY, lambda n, r: 1 + ms * work(n, r))
            found = _found(run)
            assert all((x.pattern, {*x.ranks}) == (pattern, ranks) for x in found)
            named += len(found) == 1
        # Now and then the noise is longer than 10 ms too often.
        assert named >= (30 if ms == 50 else 28)

    @INJECTED
    def test_one_of_two_ms_on_a_quiet_machine(
        self,
        work: Callable[[int, int], int],
        pattern: Pattern,
        ranks: set[int],
    ) -> None:
        run = Run(heavy=0.05).steps(TWENTY, lambda n, r: 1 + 2 * work(n, r))
        assert [(one, {*who}) for one, who in _names(run)] == [(pattern, ranks)]

    @pytest.mark.parametrize("ms", [2, 10, 50])
    def test_a_data_loader_whose_batches_take_unequal_times(self, ms: int) -> None:
        for seed in range(20):
            rng, heavy = random.Random(seed), 0.02 * ms

            def load(n: int, rank: int, rng: random.Random = rng) -> float:
                return 1 + (ms + rng.expovariate(1 / ms)) * (rank == 3)

            run = Run(seed=seed, heavy=heavy).steps(TWENTY, load)
            assert _names(run) == [(Pattern.STEADY, (3,))], seed

    @pytest.mark.parametrize("ms", [2, 10, 50])
    def test_a_callback_after_each_op(self, ms: int) -> None:
        # Nobody sees how long its rank waited; the time from the op on is its own.
        run = Run(heavy=0.05)
        run.steps(TWENTY, lambda n, rank: 1 + ms * (rank == 1))
        for one in run.records[1]:
            one["time_waited_ns"] = UNSEEN
        assert _names(run) == [(Pattern.STEADY, (1,))]

    @pytest.mark.parametrize("ranks", [2, 3, 8, 64])
    def test_groups_of_every_size(self, ranks: int) -> None:
        run = Run(ranks, heavy=0.3).steps(
            TWENTY, lambda n, r: 1 + 20 * (r == ranks - 1)
        )
        assert _names(run) == [(Pattern.STEADY, (ranks - 1,))]

    def test_a_short_one_is_named_where_it_is_quiet_and_never_wrongly(self) -> None:
        def work(n: int, rank: int) -> float:
            return 1 + 2 * (rank == 2)

        quiet = Run(heavy=0.1).steps(TWENTY, work)
        assert _names(quiet) == [(Pattern.STEADY, (2,))]
        for seed in range(100):
            found = _found(Run(seed=seed).steps(61, work))
            assert {one.ranks for one in found} <= {(2,)}

    def test_one_while_noise_has_others_last_now_and_then(self) -> None:
        for seed in range(5):
            run = Run(4, seed, heavy=3.0).steps(65, lambda n, r: 3 + 10 * (r == 2))
            lateness = Lateness(ended=True)
            lateness.take(run.dumps())
            (group,) = lateness.groups()
            (found,) = group.findings
            assert found.ranks == (2,)
            assert found.times <= 54
            # What they wait for others is none of it.
            assert found.share < group.ranks[0].waits - 0.05

    def test_one_that_noise_seldom_lets_be_the_last(self) -> None:
        named = 0
        for seed in range(10):
            rng = random.Random(seed)

            def work(n: int, rank: int, rng: random.Random = rng) -> float:
                held = 25 * rng.random() if rank > 1 and rng.random() < 0.6 else 0.0
                return 3 + held + 10 * (rank == 0)

            run = Run(4, seed, heavy=0.3).steps(65, work)
            found = _found(run, ended=True)
            assert {one.ranks for one in found} <= {(0,)}, seed
            named += any(one.pattern is Pattern.SLOW for one in found)
            for one in found:
                assert str(one).startswith(
                    ("rank 0 takes longer than the others before each", "rank 0 is")
                )
        assert named >= 5
        # Of two that are held, each as often as not, none takes longer each time.
        for seed in range(10):
            rng = random.Random(seed)

            def held(n: int, rank: int, rng: random.Random = rng) -> float:
                return 3 + 25 * (rank > 1 and rng.random() < 0.6)

            assert not _found(Run(4, seed, heavy=0.3).steps(65, held)), seed

    @pytest.mark.parametrize("late", [{1}, {0, 3}])
    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_one_within_twenty_ops_of_noise_of_half_its_length(
        self, ranks: int, late: set[int]
    ) -> None:
        if len(late) > ranks // 2:
            late = {0}
        named = 0
        for seed in range(10):
            rng = random.Random(seed)

            def work(n: int, rank: int, rng: random.Random = rng) -> float:
                return 3 + rng.expovariate(1 / 5) + 10 * (rank in late)

            run = Run(ranks, seed, heavy=0.01).steps(TWENTY, work)
            found = _found(run)
            assert {one.ranks for one in found} <= {(*sorted(late),)}, seed
            named += bool(found)
        # By who is last alone it was one in four.
        assert named >= 7

    def test_one_that_begins_late_in_a_long_run(self) -> None:
        run, lateness = Run().steps(200), Lateness()
        lateness.take(run.dumps())
        assert not lateness.findings()
        run.steps(20, lambda n, rank: 1 + 20 * (rank == 1))
        lateness.take(run.dumps(last=60))
        (found,) = lateness.findings()
        assert (found.ranks, found.of) == ((1,), 20)

    def test_one_line_of_a_step_of_three(self) -> None:
        run = Run()
        for _ in range(TWENTY):
            run.steps(1, lambda n, rank: 1 + 10 * (rank == 0), line="cell 7 line 4")
            run.steps(2, line="cell 7 line 5")
        (found,) = _found(run)
        assert (found.ranks, found.line) == ((0,), "cell 7 line 4")


def _first_of(size: int, work: Callable[[int, int], float]) -> Run:
    """Return a run in whose steps only the first of `size` ops waits for `work`."""
    run = Run(heavy=0.05)
    for n in range(31):
        run.steps(1, lambda _, rank, n=n: 1 + work(n, rank))  # type: ignore[misc]
        run.steps(size - 1, lambda _, rank: 0.2)
    return run


class TestSteps:
    """Steps with several ops at one line: buckets, parameters one by one."""

    @pytest.mark.parametrize("size", [2, 5, 12])
    @INJECTED
    def test_only_the_first_one_waits(
        self,
        size: int,
        work: Callable[[int, int], int],
        pattern: Pattern,
        ranks: set[int],
    ) -> None:
        found = _found(_first_of(size, lambda n, rank: 20 * work(n, rank)))
        if pattern is Pattern.UNEVEN:
            assert {one.ranks for one in found} <= {(3,)}
            return
        assert [(one.pattern, {*one.ranks}) for one in found] == [(pattern, ranks)]
        assert f"one all_reduce in {size} at cell 7 line 9" in str(found[0])

    @pytest.mark.parametrize("ms", [10, 50])
    @INJECTED
    def test_they_are_issued_while_the_rank_computes(
        self,
        ms: int,
        work: Callable[[int, int], int],
        pattern: Pattern,
        ranks: set[int],
    ) -> None:
        run = Run(heavy=0.05).bursts(31, 4, lambda n, r: 1 + ms * work(n, r))
        found = _names(run)
        assert [(x, {*who}) for x, who in found] == [(pattern, ranks)] or (
            pattern is Pattern.UNEVEN and {who for _, who in found} <= {(3,)}
        )

    @pytest.mark.parametrize("seed", range(8))
    def test_noise_changes_no_number_of_ops_in_a_step(self, seed: int) -> None:
        run, lateness = Run(4, seed), Lateness()
        for _ in range(7):
            run.bursts(9, 4, lambda n, r: 1 + 10 * (r == 2))
            lateness.take(run.dumps(last=200))
            assert {one.each for one in lateness.findings()} <= {4}

    def test_few_steps_are_enough_where_each_is_clear(self) -> None:
        run = Run(heavy=0.05).bursts(7, 4, lambda n, r: 1 + 20 * (r == 2))
        (found,) = _found(run)
        assert (found.pattern, found.ranks) == (Pattern.STEADY, (2,))
        assert "one all_reduce in 4 at cell 7 line 9, 6 of 6 times" in str(found)
        assert 0.015 < found.wait < 0.021

    @pytest.mark.parametrize("steps", [9, 30])
    def test_on_hosts_whose_clocks_differ(self, steps: int) -> None:
        clocks = {rank: 1000.0 * rank for rank in range(4)}
        run = Run(clocks=clocks, heavy=0.05)
        run.bursts(steps, 4, lambda n, r: 3 + 50 * (r == 0))
        (found,) = _found(run, {rank: f"host{rank}" for rank in clocks})
        assert (found.pattern, found.ranks) == (Pattern.STEADY, (0,))
        assert 0.8 < found.share < 0.95
        assert found.clock_error < 1e-3

    def test_the_first_op_of_a_step_has_no_pause_before_it(self) -> None:
        run, lateness = Run(heavy=0.05), Lateness()
        run.bursts(12, 4, lambda n, r: 3 + 50 * (r == 0))
        lateness.take(run.dumps())
        (group,) = lateness.groups()
        assert not group.pauses
        assert group.ranks[0].late == group.ranks[0].of == 47
        assert 0.8 < group.ranks[1].waits < 0.95

    def test_who_is_behind_once_in_a_step_stays_so_for_no_other_reason(self) -> None:
        for seed in (16, 28, 44, 102, 106, *range(10)):
            run = Run(2 + seed % 3, seed, heavy=3.0).bursts(9, 20, lambda n, r: 0.5)
            assert not _found(run), seed
            assert not _found(run, ended=True), seed


class TestWhoIsLate:
    @pytest.mark.parametrize("ms", [2, 10, 50])
    def test_two_of_three(self, ms: int) -> None:
        run, lateness = Run(3, heavy=0.05), Lateness()
        lateness.take(run.steps(TWENTY, lambda n, r: 1 + ms * (r > 0)).dumps())
        assert [one.ranks for one in lateness.findings()] == [(1, 2)]
        (group,) = lateness.groups()
        assert [one.late for one in group.ranks.values()] == [0, 20, 20]

    @pytest.mark.parametrize("each", [2, 10])
    def test_the_last_ones_are_not_late_where_each_takes_longer(
        self, each: int
    ) -> None:
        for seed in range(24):
            ranks = 4 + 4 * (seed % 2)
            clocks = {r: 1000.0 * (r >= ranks / 2) for r in range(ranks)}
            hosts = {r: f"host{int(at)}" for r, at in clocks.items()}
            run = Run(ranks, seed, heavy=each**0.5, clocks=clocks)
            lateness = Lateness()
            for _ in range(3):
                run.steps(20, lambda n, r: 1 + each * r)
                lateness.take(run.dumps(), hosts=hosts)
                named = {(one.pattern, one.ranks) for one in lateness.findings()}
                assert named <= {(Pattern.UNEVEN, (ranks - 1,))}, seed

    def test_turns_of_eight_in_twenty_ops(self) -> None:
        run = Run(8, heavy=0.05).steps(TWENTY, lambda n, r: 1 + 10 * (n % 8 == r))
        (found,) = _found(run)
        assert (found.pattern, {*found.ranks}) == (Pattern.TURNS, {*range(8)})


class TestSaid:
    def test_the_sentence_has_what_a_person_needs(self) -> None:
        run = Run(heavy=0.05).steps(
            TWENTY,
            lambda n, rank: 9 if rank == 2 else 1,
            late_line={2: "cell 7 line 12"},
        )
        (found,) = _found(run)
        assert str(found) == (
            "rank 2 is last to enter all_reduce at cell 7 line 9, which it enters at "
            "cell 7 line 12, 20 of 20 times: the others wait 8.0 ms each time, "
            f"{found.share:.0%} of their time"
        )
        assert 0.8 < found.share < 0.9
        assert 0.0075 < found.wait < 0.0085

    def test_each_rank_has_how_late_it_is_and_how_long_it_waits(self) -> None:
        lateness = Lateness()
        run = Run(heavy=0.05).steps(51, lambda n, rank: 9 if rank == 2 else 1)
        lateness.take(run.dumps())
        (group,) = lateness.groups()
        late, others = group.ranks[2], [group.ranks[rank] for rank in (0, 1, 3)]
        assert (late.late, late.of) == (50, 50)
        assert late.by == pytest.approx(0.008, rel=0.1)
        assert late.waits < 0.05 < 0.8 < min(one.waits for one in others)
        assert [one.late for one in others] == [0, 0, 0]

    def test_a_line_that_runs_no_more_is_left_out(self) -> None:
        run = Run(heavy=0.05).steps(TWENTY, lambda n, rank: 9 if rank == 2 else 1)
        assert _found(run)
        assert not _found(run.steps(150, lambda n, rank: 10, line="cell 8 line 1"))

    def test_at_the_end_each_line_counts_over_all_that_is_known(self) -> None:
        run = Run(heavy=0.05).steps(60, lambda n, rank: 9 if rank == 2 else 1)
        run.steps(150, lambda n, rank: 10, line="cell 8 line 1")
        (found,) = _found(run, ended=True)
        assert (found.ranks, found.line, found.of) == ((2,), "cell 7 line 9", 59)

    def test_a_pause_between_two_cells_is_no_time_that_somebody_waits(self) -> None:
        def share(pause: float) -> float:
            run = Run(heavy=0.05).steps(30, lambda n, rank: 9 if rank == 2 else 1)
            for rank in run.now:
                run.now[rank] += pause
            run.steps(30, lambda n, rank: 9 if rank == 2 else 1)
            (found,) = _found(run)
            return found.share

        assert share(60_000) == pytest.approx(share(0), abs=0.02)

    def test_an_op_that_is_rare_costs_its_part_of_all_the_time(self) -> None:
        # Rank 0 evaluates for 30 ms each ten steps of 3 ms; the others wait.
        run = Run(heavy=0.05)

        def cycles(ms: float) -> list[LateFinding]:
            for _ in range(TWENTY):
                run.steps(10, lambda n, rank: ms)
                run.steps(1, lambda n, rank: 30.0 * (rank == 0), line="cell 8 line 1")
            return _found(run)

        (found,) = cycles(3.0)
        assert (found.ranks, found.line) == ((0,), "cell 8 line 1")
        assert found.share == pytest.approx(0.5, abs=0.05)
        lateness = Lateness()
        lateness.take(run.dumps())
        (group,) = lateness.groups()
        assert group.ranks[1].waits == pytest.approx(0.5, abs=0.05)
        run = Run(heavy=0.05)
        assert not cycles(200.0)

    def test_little_waiting_in_long_steps_is_not_worth_a_word(self) -> None:
        run = Run(heavy=0.2).steps(61, lambda n, rank: 1000 + 10 * (rank == 1))
        assert not _found(run)
        lateness = Lateness()
        lateness.take(run.dumps())
        assert lateness.groups()[0].ranks[1].late >= 55


class TestNotBlamed:
    """Who is late for the time of others, by design, or without a cost."""

    def test_a_pipeline(self) -> None:
        # Each stage waits for the one before it, and works as long.
        run = Run(heavy=0.1)
        for _ in range(40):
            for rank in run.now:
                begin = run.now[rank]
                if rank:
                    arrived = run.now[rank - 1]
                    run.add(rank, "recv", begin, max(begin, arrived))
                    begin = max(begin, arrived)
                run.now[rank] = begin + 5.0
                if rank < 3:
                    run.add(rank, "send", run.now[rank], run.now[rank] + 0.01)
            run.steps(1, lambda n, rank: 0.0)
        assert not _found(run)

    def test_experts_with_unequal_parts(self) -> None:
        run = Run(heavy=0.1)
        for _ in range(40):
            for rank in run.now:
                now = run.now[rank]
                splits = [[3, 1], [2, 2]]
                run.add(rank, "all_to_all_single", now, now + 0.1, splits=splits)
            run.steps(1, lambda n, rank: 1 + 10 * (rank == 3))
        assert not _found(run)

    def test_a_rank_that_waited_in_another_group(self) -> None:
        # Rank 3 is late for all since rank 2 is late for both of them.
        run = Run(heavy=0.1)
        run.groups["tp"] = (2, 3)
        for _ in range(40):
            run.steps(1, lambda n, rank: 12.0 if rank == 2 else 1.0, group="tp")
            run.steps(1, lambda n, rank: 0.0)
        found = _found(run)
        assert {one.group.name for one in found} == {"tp"}
        assert {one.ranks for one in found} == {(2,)}

    @pytest.mark.parametrize(
        "fields",
        [{"time_waited_ns": None}, {"time_waited_ns": UNSEEN}, {"backend": "nccl"}],
    )
    def test_a_rank_that_may_have_waited_where_it_is_not_known(
        self, fields: dict[str, Any]
    ) -> None:
        run = Run(heavy=0.1)
        run.groups["other"] = (2, 3)
        for _ in range(40):
            for rank in (2, 3):
                now = run.now[rank]
                run.add(rank, "barrier", now, now + 10.0, group="other", **fields)
                run.now[rank] += 10.0
            run.steps(1)
        assert not _found(run)

    def test_an_op_after_one_whose_end_is_not_exact(self) -> None:
        # DDP's over torch's gloo: the ranks notice its end up to 100 ms later.
        run = Run(heavy=0.1)
        for _ in range(40):
            for rank in run.now:
                now = run.now[rank]
                ended = now + (8.0 if rank == 2 else 0.5)
                run.add(rank, "all_reduce", now, ended, time_waited_ns=None)
            run.steps(1, lambda n, rank: 9.0 if rank == 0 else 1.0)
        assert not _found(run)

    def test_noise_takes_no_turns_with_a_rank_that_is_late_every_second_time(
        self,
    ) -> None:
        # As one that writes a checkpoint every second step.
        for seed in (53, 59, 91, 106, 125, 134, *range(20)):
            run = Run(4 + 4 * (seed % 2), seed, heavy=1.0)
            run.steps(31, lambda n, rank: 5 + 50 * (rank == 0 and n % 2 == 0))
            assert not _found(run), seed

    def test_nor_does_a_rank_that_a_scheduler_keeps_behind(self) -> None:
        for seed in range(9):
            run, rng = Run(4, seed, heavy=0.3), random.Random(seed)

            def work(n: int, rank: int, rng: random.Random = rng) -> float:
                held = 16 * rng.random() * (rank == 2)
                return 3 + 16 * (rank == 0 and n % 2 == 0) + held

            assert not _found(run.steps(TWENTY, work)), seed

    def test_nobody_takes_the_turn_of_which_another_has_half(self) -> None:
        # As recorded over torch's gloo: rank 0 behind in half of the turns of rank 2.
        def work(n: int, rank: int) -> float:
            behind = rank == 0 and n % 8 == 2
            return 1 + 10 * (rank == n % 4) + 25 * behind

        for steps in range(21, 62):
            found = _found(Run(heavy=0.05).steps(steps, work))
            assert {frozenset(one.ranks) for one in found} <= {frozenset(range(4))}

    def test_nobody_waits_for_an_asynchronous_op(self) -> None:
        def late(n: int, rank: int) -> float:
            return 1 + 10 * (rank == 2)

        def after(rank: int) -> float:
            # All compute for as long: rank 2 issues the op later than the others.
            return 5.0 if rank == 2 else 15.0

        assert not _found(Run(heavy=0.1).steps(61, late, waited=after))
        assert not _found(Run(heavy=0.1).steps(61, late, waited=lambda rank: None))
        for seed in (14, 39, 48, *range(10)):
            # The scheduler makes them wait now and then.
            run = Run(8, seed).steps(61, late, waited=after)
            assert not _found(run), seed
        # Rank 2 works for longer in all.
        assert _found(Run(heavy=0.1).steps(61, late, waited=lambda rank: 15.0))

    @pytest.mark.parametrize("ms", [2, 10, 50])
    def test_no_link_is_slow_within_a_host(self, ms: int) -> None:
        # As recorded over torch's gloo: rank 2 left by 3.7 ms late, 17 of 20 times.
        run = Run(heavy=0.05, leave=lambda n, rank: ms * (rank == 1))
        run.steps(TWENTY, lambda n, rank: 1.0)
        assert not _found(run)
        assert not _found(run, ended=True)

    def test_nor_is_a_link_slow_where_a_scheduler_keeps_who_leaves_last(self) -> None:
        # all_reduce and barrier in a row on two cores with a load of 15.
        for seed in range(20):
            rng = random.Random(seed)

            def leave(n: int, rank: int, rng: random.Random = rng) -> float:
                return rng.expovariate(1 / 3) * (rank == 1)

            run = Run(3, seed, heavy=0.05, leave=leave)
            run.steps(61, lambda n, rank: 0.1)
            for hosts in ({}, {0: "a", 1: "b", 2: "a"}):
                assert not _found(run, hosts), seed

    def test_an_op_that_one_side_of_leaves_early_says_nothing(self) -> None:
        run = Run(heavy=0.1)
        run.op = "broadcast"
        assert not _found(run.steps(61, lambda n, rank: 1 + 10 * (rank == 2)))

    def test_one_early_rank_is_nobodys_fault(self) -> None:
        run = Run(heavy=0.1).steps(61, lambda n, rank: 1 if rank == 0 else 11)
        assert not _found(run)


class TestUnknown:
    def test_nccl_records_when_an_op_is_enqueued(self) -> None:
        run = Run(backend="nccl").steps(61, lambda n, rank: 1 + 10 * (rank == 2))
        lateness = Lateness()
        lateness.take(run.dumps())
        (group,) = lateness.groups()
        assert (group.ranks, group.findings) == ({}, ())
        assert "enqueued" in group.unknown

    def test_a_library_that_does_not_record_who_waits(self) -> None:
        run = Run().steps(61, lambda n, rank: 1 + 10 * (rank == 2))
        for records in run.records.values():
            for one in records:
                one["time_waited_ns"] = None
        lateness = Lateness()
        lateness.take(run.dumps())
        (group,) = lateness.groups()
        assert not group.findings
        assert "since when a rank waits" in group.unknown

    def test_an_op_counts_once_all_ranks_are_known_to_have_completed_it(self) -> None:
        run, lateness = Run().steps(41, lambda n, r: 1 + 20 * (r == 2)), Lateness()
        dumps = run.dumps()
        lateness.take({rank: dumps[rank] for rank in (0, 1, 2)})
        # Nor is anybody said to be in time.
        said = lateness_text(lateness.groups(), lateness.findings())
        assert "who is late is not known: no records have come of rank 3" in said
        assert not lateness.groups()[0].ranks
        cut = {**dumps[3], "records": dumps[3]["records"][:11]}
        lateness.take({**dumps, 3: cut})
        lateness.take({**dumps, 3: cut})
        assert lateness.groups()[0].ranks[2].of == 10
        lateness.take(dumps)
        assert lateness.groups()[0].ranks[2].of == 40

    def test_a_group_that_was_made_again_begins_anew(self) -> None:
        def late(n: int, rank: int) -> float:
            return 1 + 20 * (rank == 2)

        run, lateness = Run().steps(50), Lateness()
        for of in (49, 40, 59):
            lateness.take(run.dumps())
            assert lateness.groups()[0].ranks[2].of == of
            run.counts.clear()
            run.steps(41 if of == 49 else 60, late, line="cell 8 line 1")
            if of == 49:
                # Rank 1 has lost the records of the former group.
                del run.records[1][:50]
        once = Lateness()
        once.take(run.dumps())
        assert [one.ranks for one in once.findings()] == [(2,)]

    def test_a_rebuilt_group_begins_anew_with_its_first_op(self) -> None:
        """Which tells nothing yet; who was late before the rebuild is of the past."""
        run, lateness = Run(4), Lateness()
        run.steps(TWENTY, lambda n, rank: 30.0 if rank == 2 else 1.0)
        lateness.take(run.dumps())
        assert [one.ranks for one in lateness.findings()] == [(2,)]
        for rank, now in run.now.items():
            at = now + 1, now + 2
            run.add(rank, "all_reduce", *at, generation=1, collective_seq_id=1)
        lateness.take(run.dumps())
        assert lateness.groups() == []

    def test_what_is_kept_is_bounded(self) -> None:
        run, lateness = Run(2), Lateness()
        for number in range(50):
            run.steps(3, line=f"cell 7 line {number}")
        run.steps(300, line="cell 8 line 1")
        lateness.take(run.dumps())
        (group,) = lateness.groups()
        assert group.ranks[0].of <= 31 * 3 + 120


def _by_events(run: Run) -> Run:
    """Turn the ops of `run` into NCCL's: enqueued at any time, seen to end later."""
    rng = random.Random(3)
    for records in run.records.values():
        before = 0
        for one in records:
            at, left = one["time_created_ns"], one["time_ended_ns"]
            one["backend"] = "nccl"
            one["device_ns"] = (at - before, left - at) if before else None
            before = left
            one["time_created_ns"] -= int(rng.random() * 1_000_000)
            one["time_ended_ns"] += int(rng.random() * 900_000)
            one["time_waited_ns"] = 0
    return run


class TestEvents:
    """NCCL's ops, by the events of the GPUs: no clock tells who is late."""

    @INJECTED
    def test_who_is_late(
        self,
        work: Callable[[int, int], int],
        pattern: Pattern,
        ranks: set[int],
    ) -> None:
        # No two GPUs share a clock.
        run = Run(4, heavy=0.1, clocks={1: 3000.0, 2: -40.0, 3: 7.0})
        run.steps(TWENTY + 1, lambda n, rank: 2 + 10 * work(n, rank))
        (found,) = _found(_by_events(run), dict.fromkeys(range(4), "a") | {1: "b"})
        assert (found.pattern, {*found.ranks}) == (pattern, ranks)
        assert (found.clock_error, found.windows) == (0.0, {})
        assert str(found).endswith("of their time, by the GPUs' events")

    def test_healthy_ones(self) -> None:
        for seed in range(30):
            run = Run(2 + seed % 3, seed).steps(61, lambda n, rank: 2.0)
            assert not _found(_by_events(run)), seed

    def test_a_rank_that_may_wait_in_another_group_meanwhile(self) -> None:
        run = Run(4, heavy=0.1).steps(61, lambda n, rank: 2 + 10 * (rank == 2))
        assert [one.ranks for one in _found(_by_events(run))] == [(2,)]
        # An op of a pair is in flight as the one before is issued, on each rank.
        run.groups["pair"] = (2, 3)
        for rank in (2, 3):
            joint, run.records[rank] = run.records[rank], []
            for one in joint:
                at = (one["time_created_ns"] - START) / 1e6 - 1
                run.add(rank, "all_reduce", at, at + 3, group="pair", waited=None)
                run.records[rank][-1].update(backend="nccl", device_ns=(0, 3_000_000))
                run.records[rank].append(one)
        assert not _found(run)

    def test_a_rank_that_leaves_late_makes_nobody_late(self) -> None:
        run = Run(4, heavy=0.1, leave=lambda n, rank: 8.0 * (rank == 2))
        assert not _found(_by_events(run.steps(61, lambda n, rank: 2.0)))

    def test_a_kernel_that_finds_no_place_is_not_told_from_one_that_waits(self) -> None:
        run = _by_events(Run(4, heavy=0.1).steps(61, lambda n, r: 2 + 10 * (r == 2)))
        for one in run.records[2][1:]:
            since, took = one["device_ns"]
            one["device_ns"] = since - 10_000_000, took + 10_000_000
        assert not _found(run)


#: Two hosts, the clocks of which differ by 3 s.
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
CLOCKS = {2: 3000.0, 3: 3000.0}


class TestClocks:
    """Hosts whose clocks differ by seconds, aligned by the collectives themselves."""

    def _found(self, run: Run) -> list[LateFinding]:
        return _found(run, HOSTS)

    def _groups(self, run: Run) -> list[GroupLateness]:
        lateness = Lateness()
        lateness.take(run.dumps(), hosts=HOSTS)
        return lateness.groups()

    def test_three_seconds_do_not_matter(self) -> None:
        for rank in range(4):
            run = Run(clocks=CLOCKS)
            run.steps(41, lambda n, r: 1 + 20 * (r == rank))  # noqa: B023
            (found,) = self._found(run)
            assert (found.pattern, found.ranks) == (Pattern.STEADY, (rank,))
            assert 0 < found.clock_error < 0.002
            assert "the clocks of the hosts agree within" in str(found)

    def test_nor_in_healthy_runs(self) -> None:
        for seed in range(100):
            assert not self._found(Run(seed=seed, clocks=CLOCKS).steps(61))

    def test_all_ranks_of_a_host(self) -> None:
        run = Run(clocks=CLOCKS).steps(41, lambda n, r: 1 + 20 * (r > 1))
        (found,) = self._found(run)
        assert (found.pattern, found.ranks, found.hosts) == (
            Pattern.HOST,
            (2, 3),
            ("b",),
        )
        assert str(found).startswith("ranks 2–3 (b) are last to enter")

    def test_a_link_is_not_taken_for_a_clock_nor_for_work(self) -> None:
        run = Run(clocks=CLOCKS, leave=lambda n, rank: 8.0 * (rank > 1))
        assert not self._found(run.steps(61, lambda n, rank: 1.0))

    def test_an_error_as_long_as_the_lateness_is_respected(self) -> None:
        rng = random.Random(5)
        run = Run(clocks=CLOCKS)
        run.leave = lambda n, rank: 20 * rng.random() if rank > 1 else 0.0
        run.steps(61, lambda n, rank: 1 + 5 * (rank == 1))
        # By arrival nobody is late for certain; its own time is by one clock.
        assert {(one.pattern, one.ranks) for one in self._found(run)} <= {
            (Pattern.SLOW, (1,))
        }

    @pytest.mark.parametrize("ms", [12, 20, 28])
    def test_nobody_is_named_whose_time_a_slow_link_may_hide(self, ms: int) -> None:
        # What comes into host b takes 36 ms: its ranks are last, not rank 0. Without
        # a short op their clock may be ahead just as well.
        run = Run(clocks=CLOCKS, leave=lambda n, rank: 36.0 * (rank > 1))
        run.steps(61, lambda n, rank: 5 + ms * (rank == 0))
        for ended in (False, True):
            assert not _found(run, HOSTS, ended=ended)

    def test_short_ops_tell_a_slow_link_from_a_clock(self) -> None:
        run = Run(clocks=CLOCKS, heavy=0.05)

        def step(late: float = 0.0) -> None:
            run.op, run.leave = "all_reduce", lambda n, rank: 36.0 * (rank > 1)
            run.steps(1, lambda n, r: 1 + late * (r == 0), line="cell 7 line 4")
            run.op, run.leave = "barrier", lambda n, rank: 0.0
            run.steps(1, lambda n, rank: 0.1, line="cell 7 line 5")
            run.steps(1, lambda n, rank: 0.1, line="cell 7 line 6")

        for _ in range(TWENTY):
            step()
        (found,) = self._found(run)
        assert (found.pattern, found.ranks) == (Pattern.LEAVES_LATE, (2, 3))
        assert found.line == "cell 7 line 5"
        assert 0 < found.clock_error < 0.001
        (group,) = self._groups(run)
        assert group.clock_error == found.clock_error
        # Rank 0 comes last to another op, whatever the link does.
        for _ in range(TWENTY):
            step(60.0)
        named = {one.line: (one.pattern, one.ranks) for one in self._found(run)}
        assert named["cell 7 line 4"] == (Pattern.STEADY, (0,))
        assert named["cell 7 line 5"] == (Pattern.LEAVES_LATE, (2, 3))

    def test_a_clock_that_is_set_or_drifts_names_nobody_wrongly(self) -> None:
        for seed in range(40):
            rng = random.Random(seed)
            late = rng.choice((-1, 0, 3))
            run = Run(seed=seed, heavy=0.3, clocks=dict(CLOCKS))
            ppm, step = rng.uniform(-100, 100), rng.choice((-2000, -20, 0, 20))
            run.steps(61, lambda n, r: 100 + 20 * (r == late))  # noqa: B023
            for rank in CLOCKS:
                for n, record in enumerate(run.records[rank]):
                    for name in ("created", "started", "ended", "waited"):
                        key = f"time_{name}_ns"
                        ahead = (record[key] % 10**12) * ppm / 1e6
                        record[key] += int(ahead + step * 1e6 * (n > 20 + seed))
            assert {one.ranks for one in self._found(run)} <= {(late,)}, seed


class TestSpeeds:
    """How fast ops are once all ranks are in, against the fastest ones in a row."""

    def test_a_late_rank_makes_no_op_slower_and_a_slow_network_does(self) -> None:
        run, lateness = Run(heavy=0.05), Lateness()
        run.steps(TWENTY, lambda n, rank: 1.0)
        run.steps(20, lambda n, rank: 1 + 30 * (rank == 2))
        lateness.take(run.dumps())
        (fast,) = lateness.groups()[0].speeds
        assert (fast.op, fast.nbytes) == ("all_reduce", 4096)
        assert fast.best <= fast.takes < 0.0002
        assert fast.busbw == pytest.approx(4096 / fast.takes / 1e9 * 1.5)

        run.leave = lambda n, rank: 8.0
        lateness.take(run.steps(20, lambda n, rank: 1.0).dumps())
        (slow,) = lateness.groups()[0].speeds
        assert slow.takes == pytest.approx(0.008, rel=0.05)
        assert (slow.best, slow.best_busbw) == (fast.best, fast.best_busbw)
        assert slow.busbw < fast.busbw / 40
        said = lateness_text(lateness.groups(), [])
        assert "once all are in, all_reduce of 4 KiB takes 8." in said
        assert "; at best " in said

    def test_nothing_is_told_of_what_moves_nothing_or_is_too_rare(self) -> None:
        run, lateness = Run(heavy=0.05), Lateness()
        run.steps(19)
        run.op = "barrier"
        run.steps(60)
        lateness.take(run.dumps())
        assert lateness.groups()[0].speeds == ()

    def test_what_is_kept_is_bounded(self) -> None:
        speeds = Speeds()
        for bits in range(1, 60):
            for op in ("all_reduce", "all_gather"):
                for _ in range(20):
                    speeds.add(op, 1 << bits, bits * 1000)
        assert len(speeds._classes) == CLASSES
        assert [one.nbytes.bit_length() for one in speeds.told(4)] == [60, 60, 59]
