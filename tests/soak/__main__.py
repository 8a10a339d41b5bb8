"""`python -m tests.soak --runs 20 --seed 0`: make the runs and report each."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE, EXIT_USAGE
from tests.servers import end_vllm_server, free_port, start_vllm_server, wait_until_ready
from tests.soak.agent import run
from tests.soak.check import load_weights, problems_of
from tests.soak.plan import MODEL_LENGTH, Plan, draw_plan

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 240.0
"""Of one start of a run: one that takes longer hangs."""
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -signal.SIGKILL}


def main(argv: list[str] | None = None) -> int:
    """Make the runs; returns 1 if one of them hung, lost something, or trained on something else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="Of the first run; the others have the next ones.")
    parser.add_argument("--workers", type=int, default=2, help="Runs at the same time.")
    parser.add_argument("--samplers", nargs="*", help="Only the runs with these samplers.")
    parser.add_argument("--keep", action="store_true", help="Keep what good runs wrote, too.")
    options = parser.parse_args(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    plans = [draw_plan(seed) for seed in range(options.seed, options.seed + options.runs)]
    if options.samplers:
        plans = [plan for plan in plans if plan.sampler in options.samplers]
    os.environ.update(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.agent"])
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers = _servers(plans, base, stack)
        # Runs that disturb the servers must not disturb each other.
        shared = [plan for plan in plans if plan.sampler not in ("server", "engine")]
        alone = [plan for plan in plans if plan.sampler in ("server", "engine")]
        with ThreadPoolExecutor(options.workers) as pool, ThreadPoolExecutor(1) as one_by_one:
            results = [pool.submit(_roll_out, context, plan, base, servers) for plan in shared]
            results += [one_by_one.submit(_roll_out, context, plan, base, servers) for plan in alone]
            for future in as_completed(results):
                plan, problems, seconds, story = future.result()
                outcomes["bad" if problems else "good"] += 1
                print(f"{'FAIL' if problems else 'ok  '} {plan} ({story}; {seconds:.0f} s)", flush=True)
                for problem in problems[:8]:
                    print(f"       {problem}")
                if problems:
                    print(f"       {base / f'run_{plan.seed}'}; again: make soak SEED={plan.seed} RUNS=1")
                elif not options.keep:
                    shutil.rmtree(base / f"run_{plan.seed}")
    print(f"{outcomes['good']} of {len(plans)} runs were good, in {time.monotonic() - start:.0f} s", flush=True)
    if not outcomes["bad"] and not options.keep:
        shutil.rmtree(base)
    return 1 if outcomes["bad"] else 0


def _servers(plans: list[Plan], base: Path, stack: contextlib.ExitStack) -> tuple[list[Any], str]:
    """Two servers of one model, if a run needs them."""
    from agent_r1_trl.testing import make_policy, make_tokenizer

    if not any(plan.sampler in ("server", "engine") for plan in plans):
        return [], ""
    model = base / "model"
    tokenizer = make_tokenizer("qwen3")
    make_policy(tokenizer, hidden_size=64).save_pretrained(model)
    tokenizer.save_pretrained(model)
    if not any(plan.sampler == "server" for plan in plans):
        return [], str(model)
    found = []
    for index in range(2):
        folder = base / f"server_{index}"
        folder.mkdir()
        found.append(stack.enter_context(RestartableServer(model, folder)))
    return found, str(model)


class RestartableServer:
    """A vLLM server that can be killed and started again on its port, and be frozen for a while."""

    def __init__(self, model: Path, folder: Path):
        self.model = model
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Any = None

    def __enter__(self) -> RestartableServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        end_vllm_server(self.process)

    def start(self) -> None:
        """Start it; it is ready some time later."""
        options = ("--max-model-len", str(MODEL_LENGTH))
        self.process = start_vllm_server(self.model, self.folder, self.port, *options)

    def wait(self) -> None:
        """Return when it is ready."""
        wait_until_ready(self.process, self.url, self.folder / "server.log")

    def kill(self) -> None:
        """Kill it without warning, and start it again; it is ready some time later."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.start()

    def freeze(self, seconds: float) -> None:
        """Let it answer nothing for a while."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self.process.pid, signal.SIGCONT)


# -------------------------------------------------------------------- one run


def _roll_out(
    context: Any, plan: Plan, base: Path, servers: tuple[list[Any], str]
) -> tuple[Plan, list[str], float, str]:
    """Start a run until it has ended by itself; returns what is wrong with it, and its story."""
    folder = base / f"run_{plan.seed}"
    folder.mkdir(parents=True)
    rng = random.Random(f"moments {plan.seed}")
    for server in servers[0] if plan.sampler == "server" else []:
        server.wait()
    start = time.monotonic()
    story = []
    problems = []
    interrupted = False
    for attempt in range(4):
        port = free_port()
        urls = [server.url for server in servers[0]]
        ranks = [
            context.Process(target=run, args=(plan, folder, rank, port, urls, servers[1]), daemon=False)
            for rank in range(plan.num_ranks)
        ]
        for process in ranks:
            process.start()
        if attempt == 0:
            interrupted = _disturb(plan, folder, ranks, servers[0], rng)
        codes = _wait(ranks)
        story.append(",".join(str(code) for code in codes))
        if None in codes:
            problems.append(f"start {attempt} hung: it ran for more than {TIME_LIMIT_S:g} s")
            break
        if codes == [0] * plan.num_ranks:
            problems += ["it ended well, and should have failed"] if plan.must_fail else []
            break
        expected = EXIT_CODES.get(plan.signal or "")
        if attempt == 0 and interrupted and all(code in (expected, 0) for code in codes):
            continue  # resumed
        # The rank whose reward it is ends with an error of the task, the others with that or with a lost rank.
        if not plan.must_fail or not {EXIT_USAGE} <= set(codes) <= {EXIT_USAGE, EXIT_INFRASTRUCTURE}:
            problems.append(f"start {attempt} ended with {codes}")
        break
    problems += problems_of(plan, folder)
    if interrupted and plan.repeats_exactly and not problems:
        problems += _differs_from_undisturbed(context, plan, base, servers)
    return plan, problems, time.monotonic() - start, "exit " + " then ".join(story)


def _differs_from_undisturbed(context: Any, plan: Plan, base: Path, servers: tuple[list[Any], str]) -> list[str]:
    """The final weights that a killed run has otherwise than the same run without the kill."""
    undisturbed = base / "undisturbed"
    twin = replace(plan, faults=tuple(fault for fault in plan.faults if fault != plan.signal))
    _, problems, *_ = _roll_out(context, twin, undisturbed, servers)
    weights = [load_weights(folder / f"run_{plan.seed}" / "final") for folder in (base, undisturbed)]
    differ = [
        name for name in sorted(weights[0] | weights[1]) if not _is_same(*(of_run.get(name) for of_run in weights))
    ]
    if not problems and not differ:
        shutil.rmtree(undisturbed / f"run_{plan.seed}")
    return [*problems, *[f"{name} is not what it is without {plan.signal}" for name in differ]]


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _disturb(plan: Plan, folder: Path, ranks: list[Any], servers: list[Any], rng: random.Random) -> bool:
    """Do to a run what its plan says is done from outside; whether it was interrupted."""
    moment = rng.random()
    if plan.signal is None and not {"server is killed", "server freezes"} & set(plan.faults):
        return False
    # A moment somewhere between the first turn and the last step.
    deadline = time.monotonic() + 120
    while not list(folder.glob("samples_rank*.jsonl")) and time.monotonic() < deadline:
        if not any(process.is_alive() for process in ranks):
            return False
        time.sleep(0.02)
    time.sleep((1.0 if plan.sampler == "scripted" else 2.5) * moment)
    if "server freezes" in plan.faults:
        rng.choice(servers).freeze(4.0)
    if "server is killed" in plan.faults:
        rng.choice(servers).kill()
    if plan.signal is None:
        return False
    for process in ranks:
        if process.is_alive():
            os.kill(process.pid, getattr(signal, plan.signal))
    return True


def _wait(ranks: list[Any]) -> list[int | None]:
    """The exit codes; None for a rank that hung."""
    deadline = time.monotonic() + TIME_LIMIT_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


if __name__ == "__main__":
    sys.exit(main())
