"""`OrderChecker` reports a missing wait in every order of execution, and never reports a wait that is there."""

from __future__ import annotations

import pytest

from aiocuda._base._types import Span
from aiocuda.driver.simulated._order import OrderChecker
from tests.driver.simulated.kit import Bench

A, B, C = 1, 2, 3
HERE, EVENT, OTHER = 0x1000, 11, 12


@pytest.fixture
def order() -> OrderChecker:
    """Memory that was allocated in A."""
    order = OrderChecker()
    order.allocate(HERE, 64, A)
    return order


def use(order: OrderChecker, stream: int, address: int = HERE) -> str | None:
    return order.use(address, stream, order.submit(stream))


def edge(order: OrderChecker, before: int, after: int, event: int = EVENT) -> None:
    order.record(event, before)
    order.wait(after, event)


# Use behind the allocation


def test_its_own_stream_may_use_it(order: OrderChecker) -> None:
    assert use(order, A) is None


def test_another_stream_may_not_without_an_edge(order: OrderChecker) -> None:
    assert use(order, B) == f"stream {B} uses {HERE:#x}, allocated in stream {A}, which it does not wait for"


def test_another_stream_may_use_memory_after_a_wait(order: OrderChecker) -> None:
    edge(order, A, B)
    assert use(order, B) is None


def test_edges_add_up(order: OrderChecker) -> None:
    edge(order, A, B)
    edge(order, B, C, OTHER)
    assert use(order, C) is None


def test_an_edge_in_the_wrong_direction_is_none(order: OrderChecker) -> None:
    edge(order, B, A)
    assert use(order, B) is not None


def test_a_record_before_the_allocation_does_not_order_it() -> None:
    order = OrderChecker()
    order.record(EVENT, A)
    order.allocate(HERE, 64, A)
    order.wait(B, EVENT)
    assert use(order, B) is not None


def test_a_wait_takes_the_record_of_its_own_time(order: OrderChecker) -> None:
    """A later record of the event orders no stream that has waited for the earlier record."""
    early = OrderChecker()
    early.record(EVENT, A)
    early.wait(B, EVENT)
    early.allocate(HERE, 64, A)
    early.record(EVENT, A)
    assert use(early, B) is not None


def test_a_wait_for_a_never_recorded_event_orders_nothing(order: OrderChecker) -> None:
    order.wait(B, EVENT)
    assert use(order, B) is not None


@pytest.mark.parametrize("seen", ["event", "stream"])
def test_the_host_hands_on_what_it_has_seen(order: OrderChecker, seen: str) -> None:
    order.record(EVENT, A)
    assert use(order, B) is not None
    if seen == "event":
        order.event_seen_done(EVENT)
    else:
        order.stream_seen_idle(A)
    assert use(order, C) is None


def test_what_was_enqueued_before_the_host_saw_it_has_no_edge(order: OrderChecker) -> None:
    order.record(EVENT, A)
    number = order.submit(B)
    order.event_seen_done(EVENT)
    assert order.use(HERE, B, number) is not None


def test_an_address_within_is_found_and_one_outside_is_nobodys(order: OrderChecker) -> None:
    order.allocate(HERE + 0x100, 64, B)
    assert use(order, C, HERE + 63) is not None
    assert use(order, C, HERE + 64) is None
    assert use(order, C, HERE - 1) is None
    assert use(order, B, HERE + 0x100) is None


# Free behind every use


def test_free_in_its_own_stream(order: OrderChecker) -> None:
    use(order, A)
    assert order.free(HERE, A) is None


def test_free_without_an_edge_from_a_user(order: OrderChecker) -> None:
    edge(order, A, B)
    use(order, B)
    assert order.free(HERE, A) == f"{HERE:#x} is freed in stream {A}, and stream {B} may still use it"


def test_free_after_a_wait_for_every_user(order: OrderChecker) -> None:
    edge(order, A, B)
    edge(order, A, C)
    use(order, B)
    use(order, C)
    edge(order, B, A)
    edge(order, C, A, OTHER)
    assert order.free(HERE, A) is None


def test_an_edge_from_an_earlier_use_is_not_enough(order: OrderChecker) -> None:
    edge(order, A, B)
    use(order, B)
    edge(order, B, A, OTHER)
    use(order, B)
    assert order.free(HERE, A) is not None


def test_free_in_another_stream_waits_for_the_allocation(order: OrderChecker) -> None:
    assert order.free(HERE, B) == f"{HERE:#x} is freed in stream {B}, and stream {A} may still use it"


def test_what_is_freed_is_nobodys(order: OrderChecker) -> None:
    order.free(HERE, A)
    assert order.free(HERE, B) is None
    assert use(order, B) is None


# In the driver


def launched(seed: int, *, waits: bool) -> tuple[list[str], bool]:
    """One stream's memory, used by another one. What the driver says to that; and did it do harm?"""
    bench = Bench(seed)
    a, b = bench.stream(), bench.stream()
    bench.launch(a, lambda: None)
    address = bench.driver.allocate(0, 64, a)
    if waits:
        bench.driver.stream_wait(b, bench.record(a))
    bench.launch(b, lambda data: None, Span(address, (64,), "|u1"), format="P")
    while bench.driver.fault is None and not bench.idle(a, b):
        assert bench.driver.run_next()
    return bench.driver.violations, bench.driver.fault is not None


def test_driver_reports_a_missing_edge_with_every_seed() -> None:
    harm = 0
    for seed in range(200):
        (violation,), harmed = launched(seed, waits=False)
        assert violation.startswith("V11: stream 2 uses ")
        harm += harmed
    assert 0 < harm < 200  # it does harm with some seeds, and with others it does not


def test_driver_reports_no_edge_that_is_there() -> None:
    for seed in range(200):
        assert launched(seed, waits=True) == ([], False)


def test_driver_reports_a_free_that_does_not_wait() -> None:
    for seed in range(50):
        bench = Bench(seed)
        a, b = bench.stream(), bench.stream()
        address = bench.memory(a)
        assert bench.driver.stream_query(a)
        bench.launch(b, lambda data: None, Span(address, (64,), "|u1"), format="P")
        bench.driver.deallocate(address, a)
        assert [text.partition(" ")[0] for text in bench.driver.violations] == ["V11:"]


def test_a_query_that_finds_an_event_done_orders_later_work() -> None:
    bench = Bench(5)
    a, b = bench.stream(), bench.stream()
    address = bench.driver.allocate(0, 64, a)
    event = bench.record(a)
    while not bench.driver.event_query(event):
        pass
    bench.driver.fill(b, address, b"\x01", 64)
    assert bench.driver.violations == []
