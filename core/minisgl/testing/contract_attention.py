"""The contract of attention backends. On a machine without the device that a backend needs it is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.runtime.attention import AttentionBackend, GraphSupport, KVSpec
from minisgl.testing.attention import AttentionBench, GraphBench, build, facts_of
from minisgl.testing.contracts import ComponentContract

SIZES = (1, 2, 4, 8)
HEADS = [(2, 2), (4, 2), (6, 2), (10, 2), (4, 1), (16, 1)]  # query and KV heads
Make = Callable[..., AttentionBench]


class AttentionContract(ComponentContract):
    """Against float64, with the error of plain torch in the same dtype as the measure. Runs in float32 on a CPU, in bfloat16 on
    a GPU, with the first of several head sizes that the backend has."""

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        """Makes benches of the backend on the device it runs on; skips where there is none, or where it refuses."""
        made: list[AttentionBench] = []

        def bench(
            *, heads: int = 6, kv_heads: int = 2, page_size: int = 4, columns: int = 25, window: int | None = None
        ) -> AttentionBench:
            device, head_dim = self._place(heads, kv_heads, page_size, window)
            cls: Any = self.cls
            b = AttentionBench(
                build(cls, **self.options),
                device=device,
                dtype=dtype_on(device),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                pages=16 * columns,
                columns=columns,
                window=window,
            )
            made.append(b)
            return b

        yield bench
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for b in made:
            b.backend.close()

    def _place(self, heads: int, kv_heads: int, page_size: int, window: int | None) -> tuple[torch.device, int]:
        cls: Any = self.cls
        spec = KVSpec(kv_heads, 64, torch.float32, page_size)
        if cls.kv_shape(spec, 3) != AttentionBackend.kv_shape(spec, 3):
            pytest.skip("its KV pool has a shape of its own, which this bench cannot read")
        reasons = []
        for name in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            device = torch.device(name)
            for head_dim in (128, 64, 32, 16) if name == "cuda" else (8, 16, 32, 64, 128):
                facts = facts_of(device, heads, kv_heads, head_dim, dtype_on(device), page_size, window)
                reason = cls.supports(facts)
                if reason is None:
                    return device, head_dim
                reasons.append(reason)
        pytest.skip("; ".join(dict.fromkeys(reasons)))

    # ------------------------------------------------------------------------------------------------- launched steps
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
    def test_heads_and_pages(self, make: Make, heads: int, kv_heads: int, page_size: int) -> None:
        """K1: every number of query heads per KV head; rows that end before, at and after a page's edge."""
        b = make(heads=heads, kv_heads=kv_heads, page_size=page_size, columns=96 // page_size + 1)
        b.rows([1, 15, 16, 17, 31, 0], room=24)
        b.check([0, 1, 2, 3])
        b.check([4], {5: 5})

    def test_first_tokens_and_prefill_of_one_token(self, make: Make) -> None:
        b = make()
        b.rows([0, 4, 0], room=20)
        b.check(spans={0: 1, 1: 1})
        b.check(spans={2: 9})

    def test_chunks_after_a_cached_prefix(self, make: Make) -> None:
        b = make()
        b.rows([8, 0, 3], room=40)
        for chunk in (5, 1, 7, 4):
            b.check(spans={0: chunk})
        for chunk in (3, 16):
            b.check([2], {1: chunk, 0: 2})

    def test_decode_and_prefill_rows_in_one_step(self, make: Make) -> None:
        b = make()
        b.rows([21, 3, 0, 8, 30, 0], room=20)
        b.check([0, 1], {2: 9, 3: 4})
        b.check([2, 0, 3], {5: 1, 4: 6})

    def test_rows_that_share_pages(self, make: Make) -> None:
        """K3: a prefix that is cached once and read by several rows."""
        b = make()
        b.row(0, 12, pages=[3, 90, 7, 50, 51])
        b.row(1, 12, pages=[3, 90, 7, 60, 61])
        b.row(2, 8, pages=[3, 90, 70, 71])
        b.check([0, 1])
        b.check([1, 0], {2: 5})

    def test_what_the_page_table_has_beyond_a_row_is_not_read(self, make: Make) -> None:
        """N5: it may be stale. A number as large as this would show."""
        b = make()
        b.rows([5, 16, 0], room=4)
        mine = {int(p) for s in range(3) for p in b.table[s, : -(-(b.length[s] + 4) // b.page_size)]}
        others = [p for p in range(b.pages) if p not in mine]
        b.kv[:, others] = 1e4
        b.check([0, 1], {2: 4})

    def test_a_row_of_the_greatest_length(self, make: Make) -> None:
        """N5: it fills all columns of the page table but one."""
        b = make()
        b.rows([b.max_len - 1, 2, 0], room=b.max_len)
        b.check([0, 1])
        b.check([1], {2: b.max_len})

    def test_the_pool_is_left_as_it_is(self, make: Make) -> None:
        """The new K and V are in place already; a backend that writes them writes the same."""
        b = make()
        b.rows([5, 9, 0], room=20)
        before = b.kv.clone()
        b.check([0, 1], {2: 7})
        assert torch.equal(b.kv, before)

    @pytest.mark.parametrize("layer", [0, 1])
    @pytest.mark.parametrize("window", [1, 7, 30])
    def test_a_window_holds_in_its_layers_only(self, make: Make, window: int, layer: int) -> None:
        b = make(window=window)
        b.rows([1, 6, 11, 40, 0, 9], room=24)
        b.check([0, 1, 2, 3], {4: 10, 5: 5}, layer=layer)
        b.check([3, 4], layer=layer)

    def test_two_backends_at_once(self, make: Make) -> None:
        a, b = make(), make(page_size=1, columns=64)
        for x in (a, b):
            x.rows([5, 9], room=20)
        for _ in range(2):
            a.check([0, 1])
            b.check([1], {0: 2})

    # ------------------------------------------------------------------------------------------------------- graphs
    @pytest.fixture
    def graphs(self, make: Make) -> tuple[AttentionBench, GraphBench]:
        cls: Any = self.cls
        if cls.graph < GraphSupport.DECODE:
            pytest.skip("it has no graphs")
        b = make()
        b.rows([1, 15, 16, 17, 40, 3, 9, 22], room=40)
        return b, GraphBench(b, SIZES)

    def test_graphs_of_every_size(self, graphs: tuple[AttentionBench, GraphBench]) -> None:
        """K2: padded or not, and between steps that are launched."""
        b, graph = graphs
        for n in (8, 1, 2, 3, 4, 5, 6, 7):
            s = b.step(list(range(n)))
            b.compare(s, graph.run(s))
            b.compare(s, b.run(s))

    def test_padding_rows_do_not_matter(self, graphs: tuple[AttentionBench, GraphBench]) -> None:
        """K2: the same bits, whatever the dummy page and the former replay were."""
        b, graph = graphs
        s = b.step([4, 2, 6])
        first = graph.run(s, 8)
        graph.run(b.step(list(range(8))), 8)
        b.kv[:, b.pages] = 1e4
        assert torch.equal(graph.run(s, 8), first)

    def test_rows_may_change_their_order_between_replays(self, graphs: tuple[AttentionBench, GraphBench]) -> None:
        b, graph = graphs
        rng = np.random.RandomState(0)
        for n in (4, 7, 8):
            s = b.step(rng.permutation(8)[:n].tolist())
            for _ in range(2):
                t = b.permuted(s, rng.permutation(n).tolist())
                b.compare(t, graph.run(t))

    def test_a_slot_may_get_other_pages_between_replays(self, graphs: tuple[AttentionBench, GraphBench]) -> None:
        b, graph = graphs
        for length in (60, 2, 30):
            b.row(3, length, room=8)
            s = b.step([3, 0])
            b.compare(s, graph.run(s))

    def test_steps_in_flight_read_their_own_plans(self, graphs: tuple[AttentionBench, GraphBench]) -> None:
        """M3: the host runs ahead of the device, which is kept busy."""
        b, graph = graphs
        rng = np.random.RandomState(1)
        steps = [b.step(rng.permutation(8)[: rng.randint(1, 9)].tolist()) for _ in range(12)]
        if b.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        outs = [graph.run(s) for s in steps]
        for s, out in zip(steps, outs):
            b.compare(s, out)

    def test_it_says_whether_it_has_graphs(self, make: Make) -> None:
        cls: Any = self.cls
        if cls.graph >= GraphSupport.DECODE:
            assert cls.graph_plan is not AttentionBackend.graph_plan
        else:
            with pytest.raises(NotImplementedError, match="has graph = NONE"):
                make().backend.graph_begin([1])


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16
