"""A signal ends a run in good order: what was trained is saved, everything is closed, nothing is left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest
import torch
from transformers import TrainerCallback

from agent_r1_trl.features.reliability.signal_handlers import SIGNALS, SignalListener, open_signals
from agent_r1_trl.rollout import processes
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trainers.checkpoints import LOCK_FILE
from tests.own_process import signal_this_process
from tests.trainers.helpers import make_trainer

NUM_ROWS = 8
SLEEP_S = f"{10_000_000 + os.getpid()}"  # of this process alone


class Watched(AddEnv):
    """Counts environments that are open; the tool hangs in a process of its own once `hang` is set."""

    opened, closed = [], []
    hang = threading.Event()

    is_open = False

    def reset(self, example):
        self.is_open = True
        self.opened.append(id(self))
        return super().reset(example)

    def close(self):
        time.sleep(0.05)
        if self.is_open:  # the trainer and the model card make one that they only look at
            self.closed.append(id(self))

    @classmethod
    def begin(cls):
        cls.opened.clear(), cls.closed.clear(), cls.hang.clear()


@tool
def wait(a: int, b: int) -> int:
    """Wait in a shell's background job.

    Args:
        a: One number.
        b: The other.
    """
    if Watched.hang.is_set():
        subprocess.run(f"setsid sleep {SLEEP_S} & wait", shell=True, check=False)
    return a + b


Watched.tools = (wait,)


def two_turns(rng, turn):
    return call("wait", a=1, b=rng.randrange(9)) if turn == 0 else say("x" * rng.randrange(1, 9))


def sleepers():
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if SLEEP_S in (process.info["cmdline"] or []):
            found.append(process)
    return found


class At(TrainerCallback):
    """Calls a function when a step begins, or before its optimizer step."""

    def __init__(self, step, function, event="on_step_begin"):
        self.step, self.function = step, function
        setattr(self, event, self._call)

    def _call(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.function()


@pytest.fixture
def send_when():
    """`send_when(condition, signum)`: a signal to this process from another thread, once there is a reason."""
    over, senders = threading.Event(), []  # a signal that came after the test would be the next one's

    def start(condition, signum):
        def wait_and_send():
            while not condition():
                if over.wait(0.02):
                    return
            if not over.is_set():
                signal_this_process(signum)

        senders.append(threading.Thread(target=wait_and_send, daemon=True))
        senders[-1].start()

    yield start
    over.set()
    for sender in senders:
        sender.join()


@pytest.fixture
def trainer_of(tmp_path):
    def make(name="run", **options):
        Watched.begin()
        return make_trainer(tmp_path / name, env=Watched, script=two_turns, max_steps=3, **options)

    yield make
    Watched.hang.clear()
    for process in sleepers():
        process.kill()


@pytest.fixture
def hears_sighup():
    """`nohup make test` starts this process with SIGHUP ignored, which a run then ignores as well."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def whole_weights(trainer_of):
    """`whole_weights(**options)`: of a run that nothing interrupts."""

    def train(**options):
        trainer = trainer_of("whole", **options)
        trainer.train()
        return weights(trainer)

    return train


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def lock_owner(output_dir):
    text = (output_dir / LOCK_FILE).read_text()
    return json.loads(text)["pid"] if text else None


def test_a_tool_may_terminate_what_it_has_forked():
    received = []
    with SignalListener(received.append):
        fork = multiprocessing.get_context("fork")
        is_running = fork.Event()
        child = fork.Process(target=lambda: (is_running.set(), time.sleep(60)))
        child.start()
        assert is_running.wait(30)
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert not received, "the signal was the child's"
        signal_this_process(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not received and time.monotonic() < deadline:
            time.sleep(0.01)
    assert received == [signal.SIGTERM]


def test_signals_are_handled_where_notebooks_are_only_started_and_not_inside_of_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))  # papermill imports it
    shells = [None]
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shells[-1]))
    assert signal.SIGTERM in open_signals()
    shells.append(object())
    assert open_signals() == []


@pytest.mark.release
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_workers_of_the_data_loader_as_well_ends_in_a_checkpoint(
    signum, trainer_of, send_when, hears_sighup, tmp_path
):
    """As a scheduler sends it: to the whole process group, and not from the workers' parent."""
    workers = []

    def is_hanging():
        if len(sleepers()) < NUM_ROWS:
            return False
        ours = psutil.Process().children()
        workers.extend(child for child in ours if child.cmdline() == psutil.Process().cmdline())
        subprocess.run(["kill", f"-{int(signum)}", *(str(worker.pid) for worker in workers)], check=True)
        time.sleep(0.3)  # for torch to notice the end of a worker
        return True

    trainer = trainer_of(callbacks=[At(3, Watched.hang.set)], dataloader_num_workers=2)
    send_when(is_hanging, signum)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 128 + signum
    assert len(workers) == 2 and (tmp_path / "run" / "checkpoint-2").is_dir()
    del trainer
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


@pytest.mark.slow
def test_sigterm_in_a_rollout_saves_closes_and_leaves_no_process(trainer_of, send_when, whole_weights, tmp_path):
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    others = set(threading.enumerate())
    trainer = trainer_of(callbacks=[At(3, Watched.hang.set)])
    send_when(lambda: len(sleepers()) == NUM_ROWS, signal.SIGTERM)
    save, owners = trainer._save_checkpoint, []
    trainer._save_checkpoint = lambda *args, **kwargs: (
        owners.append(lock_owner(tmp_path / "run")),
        save(*args, **kwargs),
    )
    start = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 143
    assert owners == [os.getpid()], "another run could not begin before the checkpoint was written"
    assert time.monotonic() - start < 60
    assert len(Watched.opened) == 3 * NUM_ROWS
    assert sorted(Watched.closed) == sorted(Watched.opened)
    assert not sleepers()
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers
    for thread in set(threading.enumerate()) - others:
        if thread.name in ("signals", "ranks", "rollout"):
            thread.join(10)
            assert not thread.is_alive()
    assert processes.MARK not in os.environ

    resumed = trainer_of("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(weights(resumed), whole_weights())


@pytest.mark.release
def test_a_checkpoint_of_a_step_that_was_cut_between_two_of_its_rollouts_is_that_of_the_step_before(
    trainer_of, send_when, whole_weights, tmp_path
):
    accumulate = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    trainer = trainer_of(callbacks=[At(2, Watched.hang.set, "on_substep_end")], **accumulate)
    send_when(lambda: len(sleepers()) == NUM_ROWS, signal.SIGTERM)
    with pytest.raises(SystemExit):
        trainer.train()
    assert len(Watched.opened) == len(Watched.closed) == 4 * NUM_ROWS
    resumed = trainer_of("resumed", **accumulate)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert torch.equal(weights(resumed), whole_weights(**accumulate))


def test_ctrl_c_in_an_update_finishes_and_saves_it(trainer_of, tmp_path, caplog):
    def interrupt():
        signal_this_process(signal.SIGINT)
        while not trainer.features["signals"]._received:  # a thread of its own takes the signal
            time.sleep(0.01)

    interrupts = At(2, interrupt, "on_pre_optimizer_step")
    trainer = trainer_of(callbacks=[interrupts], gradient_accumulation_steps=2, per_device_train_batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2
    assert (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").exists()
    assert f"after step 2. checkpoint-2 in {tmp_path / 'run'} holds it. To go on, run the same command" in caplog.text
    assert len(Watched.closed) == len(Watched.opened) == 2 * NUM_ROWS


def test_without_save_on_signal_everything_is_closed_and_nothing_is_written(trainer_of, send_when, tmp_path, caplog):
    trainer = trainer_of(callbacks=[At(2, Watched.hang.set)], failures={"save_on_signal": False})
    send_when(lambda: len(sleepers()) == NUM_ROWS, signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 128 + signal.SIGUSR1
    assert sorted(Watched.closed) == sorted(Watched.opened)
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert "failures.save_on_signal=False" in caplog.text and "No checkpoint holds it." in caplog.text


def test_a_handler_that_a_program_has_set_itself_stays(trainer_of):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        trainer_of(callbacks=[At(2, lambda: signal_this_process(signal.SIGTERM))]).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


def test_training_works_in_a_thread_where_no_signal_can_be_handled(trainer_of):
    trainer = trainer_of()
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 3


def test_an_error_in_one_trajectory_closes_all_environments_and_ends_what_tools_have_started(trainer_of):
    trainer = trainer_of(callbacks=[At(2, Watched.hang.set)])

    class Wrong(Watched):
        def step(self, message):
            if self.hang.is_set() and len(self.opened) == 2 * NUM_ROWS and id(self) == self.opened[-1]:
                while len(sleepers()) < NUM_ROWS - 1:
                    time.sleep(0.05)
                return None
            return super().step(message)

    trainer.rollouts.env_factory = Wrong
    with pytest.raises(ValueError, match=r"Wrong\.step returned None"):
        trainer.train()
    assert sorted(Watched.closed) == sorted(Watched.opened)
    assert not sleepers()
