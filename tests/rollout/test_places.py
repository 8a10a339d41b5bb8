"""Places for trajectories: the oldest rollout comes first, and none is lost."""

import asyncio

import pytest

from agent_r1_trl.rollout.places import Places


def test_the_smallest_order_gets_the_next_place_and_equal_ones_go_by_arrival():
    began = []

    async def hold(places, order, name):
        async with places.taken(order):
            began.append(name)
            await asyncio.sleep(0.01)

    async def run():
        places = Places(1)
        late = [hold(places, order, name) for order, name in ((4, "first"), (8, "c"), (4, "a"), (8, "d"), (4, "b"))]
        await asyncio.gather(*late)
        assert places.num_taken == 0

    asyncio.run(run())
    assert began == ["first", "a", "b", "c", "d"]


@pytest.mark.parametrize("is_given", [False, True], ids=["in line", "with a place that it has not used"])
def test_a_trajectory_that_is_cancelled_takes_no_place_along(is_given):
    async def run():
        places, leave = Places(1), asyncio.Event()

        async def hold():
            async with places.taken(0):
                await leave.wait()

        holder = asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        if is_given:
            leave.set()
            await holder
            places._give()
        waiting.cancel()
        leave.set()
        await asyncio.gather(holder, waiting, return_exceptions=True)
        assert places.num_taken == 0
        async with asyncio.timeout(5), places.taken(0):
            assert places.num_taken == 1

    asyncio.run(run())


def test_a_number_that_grows_counts_from_the_next_place_on():
    async def run():
        places = Places(1)
        async with places.taken(0):
            places.number = 2
            async with asyncio.timeout(5), places.taken(1):
                assert places.num_taken == 2

    asyncio.run(run())
