"""The ring buffer against a deque."""

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.errors import NearkinError
from nearkin.methods.memory import Memory
from nearkin.methods.relation import EMPTY


def contents(memory):
    """The entries from oldest to newest, as (vector, label)."""
    order = torch.arange(len(memory.labels)) + memory.pointer
    rows = (order % len(memory.labels)).tolist()
    return [(memory.vectors[i].tolist(), int(memory.labels[i])) for i in rows if memory.labels[i] != EMPTY]


def batch_of(first, size):
    """Distinct rows."""
    y = torch.arange(first, first + size)
    return torch.stack([y.float(), -y.float()], dim=1), y


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 9), batches=st.lists(st.lists(st.booleans(), min_size=1, max_size=14), max_size=6))
def test_memory_equals_a_deque_of_kept_rows(size, batches):
    """Batches smaller and larger than the memory; each row kept or not."""
    memory, naive, first = Memory(size, 2), deque(maxlen=size), 0
    for keep in batches:
        x, y = batch_of(first, len(keep))
        memory.enqueue(x, y, keep=None if all(keep) else torch.tensor(keep))
        naive.extend((v.tolist(), int(label)) for v, label, k in zip(x, y, keep, strict=True) if k)
        first += len(keep)
        assert contents(memory) == list(naive)


def test_slots_not_filled_yet_are_empty():
    memory = Memory(5, 2)
    assert memory.labels.tolist() == [EMPTY] * 5
    memory.enqueue(*batch_of(7, 2))
    assert memory.labels.tolist() == [7, 8, EMPTY, EMPTY, EMPTY]
    refs = memory.references()
    assert refs.vectors is memory.vectors
    assert refs.labels is memory.labels
    assert refs.rows is None
    assert refs.per_class == 0


def test_a_loaded_memory_resumes():
    memory, loaded = Memory(4, 2), Memory(4, 2)
    memory.enqueue(*batch_of(0, 4))
    memory.enqueue(*batch_of(4, 3))
    assert memory.pointer == 3
    loaded.load_state_dict(memory.state_dict())
    for m in (memory, loaded):
        m.enqueue(*batch_of(7, 2))
    assert contents(loaded) == contents(memory)
    assert [label for _, label in contents(loaded)] == [5, 6, 7, 8]
    for key, value in memory.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key


def test_nothing_of_the_graph_is_kept():
    memory, x = Memory(4, 2), torch.randn(3, 2, requires_grad=True)
    memory.enqueue(x * 2, torch.arange(3))
    assert not memory.vectors.requires_grad
    assert memory.vectors.grad_fn is None
    with torch.no_grad():
        x += 1  # what was put in is a copy
    assert not torch.equal(memory.vectors[:3], (x * 2).detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_memory_stays_float32(dtype):
    memory = Memory(4, 2)
    memory.enqueue(torch.ones(2, 2, dtype=dtype), torch.arange(2, dtype=torch.int32))
    assert memory.vectors.dtype == torch.float32
    assert memory.labels.dtype == torch.int64


@pytest.mark.parametrize("lower", [torch.nn.Module.half, torch.nn.Module.bfloat16])
def test_lowering_a_whole_model_leaves_it(lower):
    memory = Memory(4, 2)
    memory.enqueue(torch.full((1, 2), 1 / 3), torch.tensor([0]))
    before = memory.vectors.clone()
    lower(torch.nn.Sequential(memory))
    assert memory.vectors.dtype == torch.float32
    assert torch.equal(memory.vectors, before)


def test_a_memory_of_size_zero_is_refused():
    with pytest.raises(NearkinError, match="at least one entry, not 0"):
        Memory(0, 2)
