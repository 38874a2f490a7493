"""The caches' memory: growing and moving rows keeps every number where it belongs."""

from collections.abc import Iterator

import pytest

from forerun.backends.ort import OnnxRuntimeBackend
from forerun.cache import CAPACITY_STEP, KeyValueCache
from forerun.engine import ElementType, Tensor
from forerun.errors import BackendError
from forerun.manifest import Architecture

LAYERS, HEADS, HEAD_SIZE = 2, 3, 4


@pytest.fixture
def backend() -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend()


@pytest.fixture
def cache(backend: OnnxRuntimeBackend) -> KeyValueCache:
    architecture = Architecture("table", LAYERS, HEADS, HEADS, HEAD_SIZE, HEAD_SIZE, 8, 4096)
    return KeyValueCache(backend, architecture)


def places(cache: KeyValueCache, rows: int, slots: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Each slot [D] of each row, and numbers that no other slot has."""
    for row in range(rows):
        for index, (_, _, tensor) in enumerate(cache.tensors(row, 1)):
            for head in range(HEADS):
                for slot in range(slots):
                    number = ((row * 2 * LAYERS + index) * HEADS + head) * slots + slot
                    offset = (head * cache.capacity + slot) * HEAD_SIZE
                    values = list(range(number * HEAD_SIZE, (number + 1) * HEAD_SIZE))
                    yield tensor.view(HEAD_SIZE, offset=offset), values


def fill(backend: OnnxRuntimeBackend, cache: KeyValueCache, rows: int, slots: int) -> None:
    for place, values in places(cache, rows, slots):
        backend.write(place, values)


def test_capacity_grows_in_steps(cache: KeyValueCache) -> None:
    for slots, capacity in (
        (1, 1),
        (CAPACITY_STEP, 1),
        (CAPACITY_STEP + 1, 2),
        (10, 2),
        (5 * CAPACITY_STEP, 5),
    ):
        cache.reserve(1, slots)
        assert cache.capacity == capacity * CAPACITY_STEP


@pytest.mark.parametrize(("rows", "slots"), [(2, 300), (5, 1), (7, 1000)])
def test_growing_keeps_every_slot(backend: OnnxRuntimeBackend, cache: KeyValueCache, rows: int, slots: int) -> None:
    cache.reserve(2, 4)
    fill(backend, cache, 2, 4)
    cache.reserve(rows, slots)
    assert all(backend.read(place) == values for place, values in places(cache, 2, 4))


def test_a_reservation_that_fits_moves_nothing(cache: KeyValueCache) -> None:
    cache.reserve(3, 10)
    before, addresses = cache.generation, [tensor.address for _, _, tensor in cache.tensors(0, 3)]
    cache.reserve(2, CAPACITY_STEP)
    assert (cache.generation, [tensor.address for _, _, tensor in cache.tensors(0, 3)]) == (before, addresses)
    cache.reserve(3, CAPACITY_STEP + 1)
    assert cache.generation > before


@pytest.mark.parametrize(("rows", "slots", "left"), [(1, 10, (1, 1)), (2, 300, (2, 2)), (0, 0, (1, 1))])
def test_trimming_keeps_every_slot_that_is_in_use(
    backend: OnnxRuntimeBackend, cache: KeyValueCache, rows: int, slots: int, left: tuple[int, int]
) -> None:
    cache.reserve(8, 2 * CAPACITY_STEP)
    fill(backend, cache, rows, slots)
    before = cache.generation
    cache.trim(rows, slots)
    assert (cache.rows, cache.capacity) == (left[0], left[1] * CAPACITY_STEP)
    assert cache.generation > before
    assert all(backend.read(place) == values for place, values in places(cache, rows, slots))


@pytest.mark.parametrize(("rows", "slots"), [(3, 10), (8, 10), (2, CAPACITY_STEP + 1)])
def test_what_is_more_than_a_quarter_in_use_is_left_alone(cache: KeyValueCache, rows: int, slots: int) -> None:
    cache.reserve(4, 2 * CAPACITY_STEP)
    before = cache.generation
    cache.trim(rows, slots)
    assert (cache.rows, cache.capacity, cache.generation) == (4, 2 * CAPACITY_STEP, before)


def test_a_reservation_never_takes_rows_or_capacity_away(cache: KeyValueCache) -> None:
    cache.reserve(4, 10)
    cache.reserve(1, 300)
    assert (cache.rows, cache.capacity) == (4, 2 * CAPACITY_STEP)


def test_moving_a_row_copies_it_and_leaves_the_others(backend: OnnxRuntimeBackend, cache: KeyValueCache) -> None:
    cache.reserve(3, 4)
    fill(backend, cache, 3, 4)
    before = [backend.read(tensor) for row in range(3) for _, _, tensor in cache.tensors(row, 1)]
    cache.end(0, 2)
    after = [backend.read(tensor) for row in range(3) for _, _, tensor in cache.tensors(row, 1)]
    per_row = 2 * LAYERS
    assert after == before[2 * per_row :] + before[per_row:]


def test_moving_a_row_that_was_never_reserved_changes_nothing(
    backend: OnnxRuntimeBackend, cache: KeyValueCache
) -> None:
    cache.end(0, 1)  # nothing is allocated yet
    cache.reserve(1, 4)
    fill(backend, cache, 1, 4)
    cache.end(0, 1)
    assert all(backend.read(place) == values for place, values in places(cache, 1, 4))


def test_without_memory_the_cache_stays_as_it_was(
    backend: OnnxRuntimeBackend, cache: KeyValueCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.reserve(1, 4)
    fill(backend, cache, 1, 4)
    generation, allocate, left = cache.generation, backend.allocate, [LAYERS]

    def allocate_a_few(element_type: ElementType, shape: tuple[int, ...]) -> Tensor:
        if not left[0]:
            raise BackendError("no room")
        left[0] -= 1
        return allocate(element_type, shape)

    monkeypatch.setattr(backend, "allocate", allocate_a_few)
    with pytest.raises(BackendError, match="no room"):
        cache.reserve(2, 300)
    assert (cache.rows, cache.capacity, cache.generation) == (1, CAPACITY_STEP, generation)
    assert all(backend.read(place) == values for place, values in places(cache, 1, 4))


def test_more_memory_than_there_is_is_a_clear_error(backend: OnnxRuntimeBackend, cache: KeyValueCache) -> None:
    with pytest.raises(BackendError, match=r"no room for a tensor of \[.*use a smaller batch or context"):
        cache.reserve(1, 2**50)


def test_a_view_cannot_reach_past_its_tensor(backend: OnnxRuntimeBackend) -> None:
    tensor = backend.allocate(ElementType.INT64, (2, 3))
    assert backend.read(tensor) == [0] * 6
    backend.write(tensor.view(2, offset=4), [8, 9])
    assert backend.read(tensor) == [0, 0, 0, 0, 8, 9]
    with pytest.raises(ValueError, match="does not fit"):
        tensor.view(3, offset=4)


def test_writes_and_copies_of_another_size_are_refused(backend: OnnxRuntimeBackend) -> None:
    one, other = (backend.allocate(ElementType.INT64, (size,)) for size in (2, 3))
    with pytest.raises(ValueError, match=r".+"):
        backend.write(one, [1, 2, 3])
    with pytest.raises(ValueError, match="a copy of 24 bytes into 16"):
        backend.copy(one, other)
    assert backend.read(one) == [0, 0]
