"""The thread pool: places are bounded, hanging jobs give theirs up, and nothing is lost."""

import asyncio
import os
import threading
import time

import pytest

from agent_r1_trl.tools.pool import DaemonThreadPool, JobTimeoutError, OwnThread, PoolExhaustedError, shared_pool


def test_it_runs_functions_on_daemon_threads():
    pool = DaemonThreadPool(2)
    thread = asyncio.run(pool.run(threading.current_thread))
    assert thread.daemon and thread is not threading.main_thread()


def test_a_queued_job_that_is_cancelled_never_runs():
    ran = []
    release = threading.Event()

    async def main():
        pool = DaemonThreadPool(1)
        first = asyncio.create_task(pool.run(release.wait))
        second = asyncio.create_task(pool.run(lambda: ran.append(1)))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.sleep(0)
        release.set()
        await first
        await pool.run(lambda: None)

    asyncio.run(main())
    assert ran == []


def test_abandoned_jobs_are_bounded_and_the_pool_recovers_when_they_return():
    release = threading.Event()

    async def main():
        pool = DaemonThreadPool(1, max_abandoned=2)
        for _ in range(3):  # two spares, then the only place itself
            with pytest.raises(JobTimeoutError):
                await pool.run(lambda: release.wait(20), timeout_s=0.02)
        with pytest.raises(PoolExhaustedError, match="3 earlier calls hang"):
            await pool.run(lambda: "never")
        release.set()
        for _ in range(100):
            try:
                return await pool.run(lambda: "again", timeout_s=5)
            except PoolExhaustedError:
                await asyncio.sleep(0.02)

    assert asyncio.run(main()) == "again"


def test_jobs_that_wait_when_the_last_place_hangs_are_told_so():
    release = threading.Event()

    async def main():
        pool = DaemonThreadPool(1, max_abandoned=0)
        hanging = asyncio.create_task(pool.run(lambda: release.wait(20), timeout_s=0.1))
        waiting = asyncio.create_task(pool.run(lambda: "never"))
        return await asyncio.gather(hanging, waiting, return_exceptions=True)

    results = asyncio.run(main())
    release.set()
    assert [type(result) for result in results] == [JobTimeoutError, PoolExhaustedError]


def test_a_job_that_ends_after_its_loop_was_closed_harms_nobody():
    pool = DaemonThreadPool(1)
    release = threading.Event()

    async def main():
        with pytest.raises(JobTimeoutError):
            await pool.run(lambda: release.wait(20), timeout_s=0.02)

    asyncio.run(main())
    release.set()
    assert asyncio.run(pool.run(lambda: 1)) == 1


def test_the_number_of_workers_is_checked():
    for max_workers in (0, -1, True, 2.0, None):
        with pytest.raises(ValueError, match=f"max_workers={max_workers}"):
            DaemonThreadPool(max_workers)


def test_a_forked_child_gets_pools_with_live_threads():
    asyncio.run(shared_pool(5).run(lambda: 1))
    assert shared_pool(5) is shared_pool(5)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(asyncio.run(shared_pool(5).run(lambda: 42, timeout_s=5))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"42"


# -------------------------------------------------------------------- no threads, long waits


def test_jobs_wait_where_the_system_has_no_more_threads_and_run_when_it_has(monkeypatch):
    state, start = {"out": True}, threading.Thread.start

    def start_or_not(thread):
        if state["out"] and thread.name.startswith("tool"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    monkeypatch.setattr("agent_r1_trl.tools.pool.POKE_S", 0.02)

    async def main():
        pool = DaemonThreadPool(2)
        jobs = [asyncio.create_task(pool.run(lambda number=number: number)) for number in range(20)]
        await asyncio.sleep(0.1)
        assert not any(job.done() for job in jobs)
        state["out"] = False
        return await asyncio.wait_for(asyncio.gather(*jobs), 10)

    assert asyncio.run(main()) == list(range(20))


def test_the_wait_for_a_place_has_a_limit_of_its_own():
    release = threading.Event()

    async def main():
        pool = DaemonThreadPool(1)
        first = asyncio.create_task(pool.run(lambda: release.wait(20)))
        await asyncio.sleep(0.05)
        started = time.perf_counter()
        with pytest.raises(PoolExhaustedError, match=r"no thread was free for 0.1 s"):
            await pool.run(lambda: 1, queue_timeout_s=0.1)
        assert time.perf_counter() - started < 5
        release.set()
        await first
        assert await pool.run(lambda: 1, queue_timeout_s=5) == 1

    asyncio.run(main())


def test_a_call_on_an_own_thread_takes_that_thread_alone_and_one_out_of_it_another():
    pool, own, before = DaemonThreadPool(2), OwnThread(), {*threading.enumerate()}

    def new_threads():
        return sorted(thread.name for thread in {*threading.enumerate()} - before)

    def call_inside():
        inner = pool.run(new_threads, thread=own, queue_timeout_s=5)
        return asyncio.run(inner)

    async def main():
        first = await pool.run(new_threads, thread=own)
        return first, await pool.run(call_inside, thread=own)

    first, inside = asyncio.run(main())
    assert first == ["environment"]
    assert [name for name in inside if name in ("environment", "tool-worker")] == ["environment", "tool-worker"]
    own.end()
