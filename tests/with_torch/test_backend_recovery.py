"""Training over the backend ``rankscope`` goes on after an abort or a death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.with_torch.ranks import Ranks
from tests.with_torch.test_backend import begun

pytestmark = pytest.mark.in_order

BEGIN = """
model = training.DistributedDataParallel(training.Net(), bucket_cap_mb=0.01)
optimizer = training.adam(model)
reducers = id(model), id(model.process_group)
done = 0

def train(steps):
    global done
    for step in range(done, done + steps):
        training.do_step(model, optimizer, training.own(step))
        done += 1

def end():
    assert (id(model), id(model.process_group)) == reducers
    train(2)
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    assert all(torch.equal(one, flat) for one in found)
    assert training.difference(model.module, done) <= 1e-6
"""

#: The ranks of torch's reconfigure are handles, which a program exchanges by itself.
HANDLES = """
from types import SimpleNamespace
handles = [None] * 3
dist.all_gather_object(handles, dist.group.WORLD.get_reconfigure_handle())

def reconfigure(handles):
    if not hasattr(distributed_c10d, '_reconfigure'):  # before torch 2.14
        options = SimpleNamespace(handles=handles, timeout=None)
        return dist.group.WORLD.reconfigure(options)
    return distributed_c10d._reconfigure(1, handles)
"""

RECOVER = """
done = rankscope.torch.rejoin(model, optimizer)
end()
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with begun(3, BEGIN, HANDLES, "train(3)") as ranks:
        yield ranks


def abort_amid(ranks: Ranks, call: str, reason: str) -> None:
    """Have rank 2 abort while ranks 0 and 1 are in `call`; they keep its ``error``."""
    waiting = f"error = raised(lambda: {call})\n"
    ranks.start({0: waiting, 1: waiting})
    for rank in (0, 1):
        ranks.wait_until(rank, "bool(dist.group.WORLD.group.status.in_flight)")
    ranks.run({2: f"rankscope.torch.abort(reason={reason!r})"})
    assert ranks.finish([0, 1]) == {}


def test_an_abort_in_backward_raises_its_reason_and_the_model_trains_on(
    three: Ranks,
) -> None:
    three.run(
        "hooked = []\n"
        "dist.group.WORLD.register_abort_hook(7, lambda: hooked.append(\n"
        "    bool(dist.group.WORLD.group.status.in_flight)))"
    )
    abort_amid(three, "train(1)", "the loss is NaN")
    three.run(
        {
            rank: "assert type(error).__name__ == 'DistAbortedError', error\n"
            "assert ' in DistributedDataParallel.backward)' in str(error), error\n"
            "assert error.reason == 'the loss is NaN'\n"
            "assert error.op == 'all_reduce'"
            for rank in (0, 1)
        }
    )
    three.run(
        "assert hooked == [rank != 2], hooked\n"
        "dist.group.WORLD.unregister_abort_hook(7)\n"
        "rankscope.torch.rebuild()" + RECOVER
    )


def test_an_interrupt_ends_a_backward_that_hangs(three: Ranks) -> None:
    interrupted = """
    import time
    def stop():
        global sent
        while not dist.group.WORLD.group.status.in_flight:
            time.sleep(0.001)
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=stop)
    thread.start()
    error = raised(lambda: train(1))
    took = time.monotonic() - sent
    thread.join()
    assert isinstance(error, KeyboardInterrupt), error
    assert took < 0.3, took
    rankscope.torch.abort(reason="interrupted")
    """
    three.run({0: dedent(interrupted)})
    three.run("rankscope.torch.rebuild()" + RECOVER)


@pytest.mark.parametrize("hook", [False, True])
def test_an_abort_ends_the_first_pass_of_a_static_graph(
    three: Ranks, hook: bool
) -> None:
    three.run(
        "static = training.DistributedDataParallel(training.Net(), static_graph=True)\n"
        f"if {hook}:\n"
        "    static.register_comm_hook(\n"
        "        None, training.default_hooks.fp16_compress_hook)"
    )
    abort_amid(three, "static(training.own(0)).sum().backward()", "too early")
    three.run({0: "assert 'too early' in str(error), error"})
    three.run(
        "rankscope.torch.rebuild()\n"
        "rankscope.torch.rejoin(static)\n"
        "static_optimizer = training.adam(static)\n"
        "assert training.train(static, static_optimizer) <= (0.05 if "
        f"{hook} else 1e-5)"
    )


def test_a_model_of_mixed_precision_trains_on_after_an_abort(three: Ranks) -> None:
    three.run(
        "half = training.halved(torch.float32)\n"
        "half_optimizer = training.adam(half)\n"
        "def half_steps(*steps):\n"
        "    for step in steps:\n"
        "        training.do_step(half, half_optimizer, training.own(step))\n"
        "half_steps(0, 1)"
    )
    abort_amid(three, "half_steps(2)", "half of it")
    three.run(
        {
            rank: "assert type(error).__name__ == 'DistAbortedError', error\n"
            "assert error.reason == 'half of it'"
            for rank in (0, 1)
        }
    )
    three.run(
        "rankscope.torch.rebuild()\n"
        "assert rankscope.torch.rejoin(half, half_optimizer) == 2\n"
        "half_steps(2, 3)\n"
        "expected = training.halved_alone(torch.float32, 4)\n"
        "found = training.difference(half.module, expected=expected)\n"
        "assert found <= 1e-5, found"
    )


def test_optimizers_in_an_aborted_backward_have_no_rejoin_but_another_ddp(
    three: Ranks,
) -> None:
    three.run(
        "net = training.Net()\n"
        "training._apply_optimizer_in_backward(\n"
        "    torch.optim.SGD, net.parameters(), {'lr': 0.01})\n"
        "stepping = training.DistributedDataParallel(net, bucket_cap_mb=0.01)"
    )
    abort_amid(three, "stepping(training.own(0)).sum().backward()", "amid a step")
    three.run({0: "assert error.reason == 'amid a step', error"})
    three.run(
        "rankscope.torch.rebuild()\n"
        "error = raised(lambda: rankscope.torch.rejoin(stepping))\n"
        "assert 'has done a part of its step' in str(error), error\n"
        "net.zero_grad()\n"
        "stepping._remove_autograd_hooks()\n"
        "net.load_state_dict(training.Net().state_dict())\n"
        "stepping = training.DistributedDataParallel(net, bucket_cap_mb=0.01)\n"
        "stepping(training.own(0)).pow(2).mean().backward()\n"
        "alone = training.Net()\n"
        "alone(training.batch(0)).pow(2).mean().backward()\n"
        "for one, other in zip(net.parameters(), alone.parameters(), strict=True):\n"
        "    assert torch.allclose(one, other - 0.01 * other.grad, atol=1e-6)"
    )


def test_many_aborts_leave_the_ranks_equal_and_nothing_behind(three: Ranks) -> None:
    """Among them aborts in the first two steps, before DDP has its final buckets."""
    # A cell of its own: the first abort must find all ranks behind the constructor.
    three.run(BEGIN)
    three.run(
        dedent(
            """
            import gc, random, rankscope
            from rankscope.backends.groups.generation import Generation
            def generations():
                gc.collect()
                return sum(isinstance(one, Generation) for one in gc.get_objects())
            kept = generations()
            chosen = sorted([0, 1, *random.Random(1).sample(range(2, 60), 10)])
            errors, open_at_first, joined = 0, None, True
            while done < 60:
                try:
                    # Another rank may abort while this one rejoins.
                    if not joined:
                        done = rankscope.torch.rejoin(model, optimizer)
                        joined = True
                        chosen = [one for one in chosen if one >= done]
                        if open_at_first is None:
                            open_at_first = len(os.listdir("/proc/self/fd"))
                    if chosen and done == chosen[0]:
                        chosen.pop(0)
                        if rank == done % 3:
                            loss = model(training.own(done)).sum()
                            rankscope.torch.abort(reason=f"in step {done}")
                    train(1)
                except rankscope.DistAbortedError:
                    errors += 1
                    rankscope.torch.rebuild()
                    joined = False
            end()
            assert errors >= 12, errors
            # What has ended is gone: nothing in C++ keeps an error and its frames.
            assert generations() <= kept
            assert len(os.listdir("/proc/self/fd")) <= open_at_first + 2
            """
        )
    )


def test_ranks_whose_buckets_differ_train_on(three: Ranks) -> None:
    """An abort came when only some had built their final buckets."""
    three.run(
        {
            1: "from rankscope.backends.torch_backend import private\n"
            "private.reset_reducer(model, anew=True)"
        }
    )
    three.run("rankscope.torch.rebuild()" + RECOVER)


def test_ranks_with_ddps_constructor_behind_them_meet_no_op_of_it(
    three: Ranks,
) -> None:
    """Its ops met those of `rejoin`, and of the constructor of another model."""
    three.run("new = training.DistributedDataParallel(training.Net())")
    three.run({2: "rankscope.torch.abort(reason='it was the last rank there')"})
    three.run(
        dedent(
            """
            import types
            from rankscope.backends.work.flight_recorder import recorder
            rankscope.torch.rebuild()
            makes = training.DistributedDataParallel
            count = recorder.count
            if rank == 1:
                del new  # as if the abort had ended its constructor
                new = makes(training.Net())
            else:
                error = raised(lambda: new(torch.ones(1, 16)))
                assert "is from before the group was rebuilt" in str(error), error
            if rank == 0:
                other = makes(training.Net())
            if rank != 0:  # the constructor of another model: of the next line
                other = makes(training.Net())
            assert recorder.count == count
            for refused in ([new] if rank == 1 else []) + [other]:
                error = raised(lambda: refused(torch.ones(1, 16)))
                assert "was made without the values of the other" in str(error), error
            with torch.no_grad():
                next(new.parameters()).fill_(rank)
            adam = training.adam(new)
            assert rankscope.torch.rejoin(new, adam) == 0
            assert next(new.parameters()).eq(0).all()
            new.load_state_dict(makes(training.Net(), init_sync=False).state_dict())
            training.do_step(new, adam, training.own(0))
            assert training.difference(new.module, 1) <= 1e-6
            # All construct another one: as ever, by ops.
            count = recorder.count
            another = makes(training.Net())
            assert recorder.count > count
            another(torch.ones(1, 16))
            # But for one of the same line of another file, called in the same line.
            count, modules = recorder.count, [types.ModuleType(one) for one in "ab"]
            for one in modules:
                exec("def build(makes, net): return makes(net)", vars(one))
            elsewhere = modules[rank == 0].build(makes, training.Net())
            assert recorder.count == count
            error = raised(lambda: elsewhere(torch.ones(1, 16)))
            assert "was made without the values of the other" in str(error), error
            rankscope.torch.rejoin(other)
            other(torch.ones(1, 16))
            done = rankscope.torch.rejoin(model, optimizer)
            """
        )
    )


def test_rejoin_takes_the_state_of_the_rank_with_most_steps(three: Ranks) -> None:
    three.run(
        "before = done\n"
        "if rank == 1:\n"
        "    for one in model.parameters():\n"
        "        one.grad = None\n"
        "        one.data += 1\n"
        "    for state in optimizer.state.values():\n"
        "        state['step'] -= 1\n"
        "assert rankscope.torch.rejoin(model, optimizer) == before\n"
        "end()"
    )


def test_a_step_that_an_interrupt_cut_short_is_of_no_rank(three: Ranks) -> None:
    """Adam counts it as done; an error in the closure of a step comes before it."""
    three.run(
        dedent(
            """
            from torch.utils._python_dispatch import TorchDispatchMode
            class Interrupt(TorchDispatchMode):
                left = 3
                def __torch_dispatch__(self, call, types, args=(), kwargs=None):
                    self.left -= "addcdiv" in str(call)
                    if not self.left:
                        raise KeyboardInterrupt
                    return call(*args, **kwargs or {})
            def interrupted_step():
                with Interrupt():
                    training.do_step(model, optimizer, training.own(done))
            before = done
            if rank == 0:
                error = raised(interrupted_step)
                assert isinstance(error, KeyboardInterrupt), error
            else:
                train(1)
            done = rankscope.torch.rejoin(model, optimizer)
            assert done == before + 1
            end()

            before = done
            error = raised(lambda: optimizer.step(lambda: 1 / 0))
            assert isinstance(error, ZeroDivisionError), error
            assert rankscope.torch.rejoin(model, optimizer) == before
            saved = model.state_dict(), optimizer.state_dict()
            saved = training.copy.deepcopy(saved)
            error = raised(interrupted_step)
            error = raised(lambda: rankscope.torch.rejoin(model, optimizer))
            assert "ranks 0–2 may have parts of two steps" in str(error), error
            def load():
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                return before
            done = rankscope.torch.rejoin(model, optimizer, load=load)
            end()
            """
        )
    )


def test_powersgd_begins_anew_on_all_ranks(three: Ranks) -> None:
    """As in a training in which it does so at this step; rank 1 is as a fresh one."""
    three.run(
        dedent(
            """
            from rankscope.backends.torch_backend import private
            power_sgd = training.powerSGD_hook
            def compressed():
                model = training.DistributedDataParallel(
                    training.Net(), bucket_cap_mb=0.01)
                state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2,
                    start_powerSGD_iter=2, min_compression_rate=1)
                model.register_comm_hook(state, power_sgd.powerSGD_hook)
                return model, training.adam(model), state
            def its_steps(model, optimizer, _, *steps):
                for step in steps:
                    training.do_step(model, optimizer, training.own(step))
            faulty, whole = compressed(), compressed()
            its_steps(*faulty, *range(5))
            its_steps(*whole, *range(5))
            """
        )
    )
    abort_amid(three, "its_steps(*faulty, 5)", "compressed")
    three.run(
        dedent(
            """
            if rank == 1:
                private.reset_reducer(faulty[0], anew=True)
                faulty[2].iter = 0
                for kept in faulty[2].error_dict, faulty[2].q_memory_dict:
                    kept.clear()
            rankscope.torch.rebuild()
            assert rankscope.torch.rejoin(*faulty[:2]) == 5
            _, _, state = whole
            for kept in state.error_dict, state.p_memory_dict, state.q_memory_dict:
                kept.clear()
            state.iter = 0
            state.rng.seed(0)
            rankscope.torch.rejoin(*whole[:2], step=5)
            its_steps(*faulty, *range(5, 10))
            its_steps(*whole, *range(5, 10))
            assert faulty[2].iter == 5
            for one, other in zip(faulty[0].parameters(), whole[0].parameters()):
                assert torch.equal(one, other)
            """
        )
    )


def test_a_state_of_a_hook_that_nobody_knows_is_told(three: Ranks) -> None:
    three.run(
        "import warnings\n"
        "hooked = training.DistributedDataParallel(training.Net())\n"
        "hooked.register_comm_hook(\n"
        "    {'steps': rank}, training.default_hooks.allreduce_hook)\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    rankscope.torch.rejoin(hooked)\n"
        "(told,) = told\n"
        "assert 'hook allreduce_hook has a state, a dict, which' in str(told.message)\n"
        "assert told.filename.startswith('cell'), told.filename"
    )


def test_an_overlapped_sharded_optimizer_is_refused(three: Ranks) -> None:
    three.run({0: "rankscope.torch.abort(reason='for the next test')"})
    three.run(
        "rankscope.torch.rebuild()\n"
        "overlapped = training.ZeroRedundancyOptimizer(\n"
        "    model.parameters(), torch.optim.Adam, overlap_with_ddp=True)\n"
        "error = raised(lambda: rankscope.torch.rejoin(model, overlapped))\n"
        "assert 'with overlap_with_ddp' in str(error), error\n"
        "done = rankscope.torch.rejoin(model, optimizer)"
    )


def test_a_wrong_shrink_is_refused(three: Ranks) -> None:
    three.run(
        "error = raised(rankscope.torch.shrink)\n"
        "assert 'which ranks are lost?' in str(error), error\n"
        "assert 'it was not aborted' in str(error), error\n"
        "error = raised(lambda: rankscope.torch.shrink([rank]))\n"
        "assert 'this is one of them' in str(error), error\n"
        "error = raised(lambda: rankscope.torch.shrink([3]))\n"
        "assert 'from 0 to 2' in str(error), error"
    )


def test_torchs_reconfigure_rebuilds_and_refuses_what_is_no_rank(three: Ranks) -> None:
    three.run(
        "assert dist.group.WORLD.supports_reconfigure is False\n"
        "for bad in handles[::-1], [*handles, 'other'], set(), {'other'}:\n"
        "    error = raised(lambda: reconfigure(bad))\n"
        "    assert 'expected some of' in str(error), error"
    )
    abort_amid(three, "train(1)", "to be reconfigured")
    three.run("assert reconfigure(set(handles)).wait()" + RECOVER)


def test_sharded_models_train_on_after_an_abort_at_any_of_their_ops(
    three: Ranks,
) -> None:
    """FSDP2 keeps parameters, gradients and notes of a pass that failed."""
    three.run(
        dedent(
            """
            from rankscope.backends.work.hooks import add_op_hook
            for number in range(20):
                sharded = training.Net()
                for one in sharded.first, sharded.second, sharded:
                    training.fully_shard(one)
                its_optimizer = training.adam(sharded)
                training.do_step(sharded, its_optimizer, training.own(0))
                issued = []
                def count(record):
                    issued.append(record)
                    if len(issued) == number + 1 and rank == 1:
                        rankscope.torch.abort(reason="at an op")
                counting, ended = add_op_hook(pre=count), True
                try:
                    training.do_step(sharded, its_optimizer, training.own(1))
                except rankscope.DistAbortedError as error:
                    # It may come before this rank has issued as many.
                    assert error.reason == "at an op"
                    ended = False
                counting.remove()
                if not ended:
                    rankscope.torch.rebuild()
                found = rankscope.torch.rejoin(sharded, its_optimizer)
                assert found == 1 + ended
                for step in range(found, 4):
                    training.do_step(sharded, its_optimizer, training.own(step))
                assert training.difference(sharded, 4) <= 1e-6, number
                if ended:
                    break
            assert number >= 8, number
            """
        )
    )


def test_the_state_of_a_sharded_optimizer_is_loaded_after_an_abort(
    three: Ranks,
) -> None:
    """Its ranks send what they stepped: an abort may come when some were sent."""
    three.run(
        "zero = training.ZeroRedundancyOptimizer(\n"
        "    model.parameters(), torch.optim.Adam)\n"
        "error = raised(lambda: rankscope.torch.rejoin(model, zero))\n"
        "assert 'the state of ranks 0–2 is lost' in str(error), error\n"
        "assert error.culprits == (0, 1, 2), error.culprits\n"
        "def load(found):\n"
        "    return rankscope.torch.rejoin(model, zero, load=lambda: found)\n"
        "error = raised(lambda: load(rank))\n"
        "assert 'load returned [0, 1, 2] on ranks [0, 1, 2]' in str(error), error\n"
        # A model into which no checkpoint was loaded to the end stays lost.
        "error = raised(lambda: rankscope.torch.rejoin(model, optimizer))\n"
        "assert 'the state of ranks 0–2 is lost' in str(error), error\n"
        "assert load(done) == done"
    )


def test_fsdp1_is_refused(three: Ranks) -> None:
    three.run(
        "from torch.distributed.fsdp import FullyShardedDataParallel\n"
        "cpu = torch.device('cpu')\n"
        "old = FullyShardedDataParallel(training.Net(), device_id=cpu)\n"
        "error = raised(lambda: rankscope.torch.rejoin(old))\n"
        "assert 'expected torch.distributed.fsdp.fully_shard' in str(error), error"
    )


def test_the_survivors_of_a_killed_rank_train_on_in_the_same_objects(
    three: Ranks,
) -> None:
    pid = three.ask(1, "os.getpid()")
    three.run("pair = dist.new_group([0, 1]); rest = dist.new_group([0, 2])")
    waiting = "error = raised(lambda: train(1))\n"
    three.start({0: waiting, 2: waiting})
    for rank in (0, 2):
        three.wait_until(rank, "bool(dist.group.WORLD.group.status.in_flight)")
    os.kill(pid, signal.SIGKILL)
    assert three.finish([0, 2]) == {}
    check = """
assert type(error).__name__ == "DistAbortedError", error
assert "rank 1" in error.reason and "SIGKILL" in error.reason, error.reason
reconfigure([handles[0], handles[2]])
assert dist.get_world_size() == 2
assert dist.get_rank() == (rank and 1)
"""
    after = """
x = torch.ones(1)
made = dist.new_group([0, 1])
for group in made, rest, None:
    dist.all_reduce(x, group=group)
assert x.item() == 8
dist.destroy_process_group()
assert world.groups() == []
"""
    three.run(dict.fromkeys((0, 2), check + RECOVER + after))
