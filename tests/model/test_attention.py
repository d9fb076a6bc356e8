"""The unroll's attention against a dense softmax in float64: values, every gradient, isolation and memory."""

import sys
from collections.abc import Iterator
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_train.errors import InputError
from eagle_train.model import attention
from eagle_train.model.attention import (
    DocumentLayout,
    causal_attention,
    choose_backend,
    dense_attention,
    unrolled_attention,
)

# (step keys k, query heads N, key/value heads H, head size d)
SHAPES = [
    (0, 4, 4, 32),
    (1, 6, 2, 64),
    (2, 4, 1, 80),
    (3, 3, 3, 128),
    (4, 9, 3, 64),
    (5, 8, 2, 32),
    (6, 6, 2, 128),
]
# One-token documents, two of one length apart and side by side, an empty document, a long tail.
LAYOUT = (0, 1, 8, 8, 9, 10, 41, 48, 55, 56, 104)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny; on a busy machine a second thread makes these tests five times slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def random_layout(seed: int) -> DocumentLayout:
    """Documents of 1 to 39 rows, many of one row, an empty one, and by turns a long tail or an empty one."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (8,), generator=generator)
    lengths = (lengths * torch.randint(0, 2, (8,), generator=generator)).clamp(min=1).tolist()
    tail = [0] if seed % 2 else [70]
    return DocumentLayout.from_offsets([0, *accumulate([*lengths[:4], 0, *lengths[4:], *tail])])


def random_inputs(shape: tuple[int, int, int, int], num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value, then k step keys, then k step values."""
    k, num_heads, num_kv_heads, head_size = shape
    torch.manual_seed(sum(shape) + num_rows)
    heads = [num_heads] + [num_kv_heads] * (2 + 2 * k)
    return [torch.randn(num_rows, n, head_size).to(dtype).requires_grad_() for n in heads]


def split(inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    k = (len(inputs) - 3) // 2
    return inputs[0], inputs[1], inputs[2], tuple(inputs[3 : 3 + k]), tuple(inputs[3 + k :])


def errors(inputs: list[Tensor], layout: DocumentLayout, **options: Any) -> tuple[float, float]:
    """(largest error of the output, largest error of a gradient over that gradient's largest entry)."""
    out = unrolled_attention(*split(inputs), layout, **options)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad_out)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = dense_attention(*split(exact_inputs), layout)
    exact_grads = torch.autograd.grad(exact, exact_inputs, grad_out.double())
    assert out.dtype == inputs[0].dtype
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in inputs]
    grad_error = max(
        ((got - want).abs().max() / want.abs().max().clamp_min(1e-3)).item()
        for got, want in zip(grads, exact_grads, strict=True)
    )
    return (out - exact).abs().max().item(), grad_error


@pytest.mark.parametrize("backend", ["cpu", "matmul"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "out_bound", "grad_bound"),
    [
        (torch.float64, 1e-12, 1e-12),
        (torch.float32, 1e-5, 1e-5),
        # Outputs are about 3 at most: one bfloat16 rounding of the kernel's output and one of the merged one.
        (torch.bfloat16, 3e-2, 2e-2),
    ],
    ids=["float64", "float32", "bfloat16"],
)
def test_values_and_all_gradients_equal_the_dense_reference(
    shape: tuple[int, int, int, int], backend: str, dtype: torch.dtype, out_bound: float, grad_bound: float
) -> None:
    layout = DocumentLayout.from_offsets(LAYOUT)
    out_error, grad_error = errors(random_inputs(shape, layout.num_rows, dtype), layout, backend=backend)
    assert out_error <= out_bound
    assert grad_error <= grad_bound


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("ttt_steps", range(1, 8))
def test_random_layouts_equal_the_dense_reference(ttt_steps: int, dtype: torch.dtype, bound: float) -> None:
    """The last step of an unroll of K = 1..7, with heads alone and grouped, of sizes 32 to 128."""
    for seed, heads in enumerate([(2, 2, 32), (6, 2, 64), (4, 1, 96), (8, 4, 128)], start=ttt_steps):
        layout = random_layout(seed)
        inputs = random_inputs((ttt_steps - 1, *heads), layout.num_rows, dtype)
        assert max(errors(inputs, layout, backend="cpu")) <= bound


def test_very_many_documents_equal_the_dense_reference() -> None:
    """200 documents of one to four rows, so that every length is a batch of many that lie apart."""
    lengths = torch.randint(1, 5, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    layout = DocumentLayout.from_offsets([0, *accumulate(lengths)])
    assert max(errors(random_inputs((3, 4, 2, 32), layout.num_rows, torch.float32), layout)) <= 1e-5


def test_matmul_backend_is_exact_across_its_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", 7)
    layout = DocumentLayout.from_offsets(LAYOUT)
    inputs = random_inputs((2, 4, 2, 32), layout.num_rows, torch.float64)
    assert max(errors(inputs, layout, backend="matmul")) <= 1e-12


def test_gradients_pass_gradcheck() -> None:
    layout = DocumentLayout.from_offsets((0, 1, 4, 6))
    inputs = random_inputs((2, 2, 1, 4), layout.num_rows, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: unrolled_attention(*split(list(x)), layout), inputs)


def test_one_token_document_is_a_softmax_over_its_own_keys() -> None:
    layout = DocumentLayout.from_offsets((0, 1))
    query = torch.tensor([[[2.0, 0.0, 0.0, 0.0]]])  # scale 1/2: the score is the key's first entry
    step0, step1 = torch.tensor([[[1.0, 0, 0, 0]]]), torch.tensor([[[3.0, 0, 0, 0]]])
    value0, value1 = torch.full((1, 1, 4), 10.0), torch.full((1, 1, 4), 20.0)
    out = unrolled_attention(query, step0, value0, (step1,), (value1,), layout)
    weight = torch.tensor([1.0, 3.0]).softmax(0)
    torch.testing.assert_close(out, torch.full((1, 1, 4), (10 * weight[0] + 20 * weight[1]).item()))


def test_strided_inputs_and_expanded_output_gradients() -> None:
    """Query, key and value as views of one projection, and the stride-0 gradient that sum() sends back."""
    layout = DocumentLayout.from_offsets(LAYOUT)
    torch.manual_seed(0)
    fused = torch.randn(layout.num_rows, 4 + 2 + 2, 32, requires_grad=True)
    step = torch.randn(layout.num_rows, 2, 32)
    grads = []
    for attend in (unrolled_attention, dense_attention):
        query, key, value = fused.split((4, 2, 2), dim=1)
        out = attend(query, key, value, (step,), (step,), layout)
        grads.append(torch.autograd.grad(out.sum(), fused)[0])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "matmul"])
def test_changing_one_document_leaves_the_others_bitwise(backend: str) -> None:
    layout = DocumentLayout.from_offsets(LAYOUT)
    changed = torch.zeros(layout.num_rows, dtype=torch.bool)
    changed[10:41] = True
    results = []
    for change in (False, True):
        inputs = random_inputs((3, 6, 2, 32), layout.num_rows, torch.float32)
        if change:
            inputs = [torch.where(changed[:, None, None], 1 - x, x).detach().requires_grad_() for x in inputs]
        out = unrolled_attention(*split(inputs), layout, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[~changed], after[~changed])
        assert not torch.equal(before[changed], after[changed])


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operator's result held."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]
        self.numel = max(self.numel, *(x.numel() for x in tensors), 0)
        return result


def test_memory_is_linear_in_the_row() -> None:
    num_rows = 20_000
    layout = DocumentLayout.from_offsets(range(0, num_rows + 1, 100))
    inputs = random_inputs((3, 4, 2, 32), num_rows, torch.float32)
    with LargestTensor() as largest:
        unrolled_attention(*split(inputs), layout).sum().backward()
    assert largest.numel <= num_rows * 4 * 32  # one [T, N, d] tensor; T x T would be 156 times as much


def test_causal_attention_takes_a_scale_and_no_gradient() -> None:
    layout = DocumentLayout.from_offsets(LAYOUT)
    query, key, value = random_inputs((0, 4, 2, 32), layout.num_rows, torch.float32)
    out = causal_attention(query, key, value, layout, scale=0.5)
    assert not out.requires_grad
    torch.testing.assert_close(out, dense_attention(query * (0.5 * 32**0.5), key, value, (), (), layout))


def test_layout_groups_cover_every_row_once() -> None:
    layout = DocumentLayout.from_offsets(LAYOUT)
    rows = torch.cat([torch.arange(layout.num_rows)[rows] for _, rows in layout.groups])
    assert rows.sort().values.tolist() == list(range(layout.num_rows))
    assert layout.max_seqlen == 48
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens.tolist() == list(layout.offsets)
    assert isinstance(DocumentLayout.from_offsets((0, 5, 10)).groups[0][1], slice)


def test_unusable_backends_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = DocumentLayout.from_offsets((0, 2))
    query, key, value = random_inputs((0, 1, 1, 8), 2, torch.float32)
    assert choose_backend(query) == "cpu"
    with pytest.raises(InputError, match="'flux' is unknown: use one of cpu, flash_attn, torch_cuda, matmul"):
        unrolled_attention(query, key, value, (), (), layout, backend="flux")
    monkeypatch.setattr(attention, "_flash_attn", lambda: None)
    with pytest.raises(InputError, match=r"needs flash-attn >= 2.7"):
        unrolled_attention(query, key, value, (), (), layout, backend="flash_attn")


# What follows checks how the CUDA backends are called; what their kernels compute takes a GPU (last test).


def stand_in_flash_attn() -> ModuleType:
    """flash_attn 2.8.3's two varlen functions, with its argument names, over our matmul backend."""
    matmul = attention._BACKENDS["matmul"]

    def check(
        q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool
    ) -> DocumentLayout:
        assert causal
        assert q.shape[1] % k.shape[1] == 0
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        return DocumentLayout.from_offsets(cu_seqlens_q.tolist())

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layout = check(q, k, cu_seqlens_q, cu_seqlens_k, causal)
        assert max_seqlen_q == max_seqlen_k == layout.max_seqlen
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (
            0.0,
            -1,
            -1,
            0.0,
            None,
        )
        out, lse_TN = matmul.forward(q, k, v, layout, softmax_scale)
        return out, lse_TN.t().contiguous(), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        layout = check(q, k, cu_seqlens_q, cu_seqlens_k, causal)
        assert softmax_lse.dtype == torch.float32
        assert softmax_lse.shape == (q.shape[1], q.shape[0])
        assert all(x.is_contiguous() for x in (dout, out, softmax_lse, dq, dk, dv))
        saved = attention._Saved(q, k, v, out, softmax_lse.t())
        for grad, value in zip(
            (dq, dk, dv), matmul.backward(dout, saved, layout, softmax_scale), strict=True
        ):
            assert grad.dtype == q.dtype
            grad.copy_(value)
        return torch.empty(0)

    module = ModuleType("flash_attn.flash_attn_interface")
    module.__dict__.update(
        _wrapped_flash_attn_varlen_forward=forward, _wrapped_flash_attn_varlen_backward=backward
    )
    return module


def test_flash_attn_backend_calls_a_stand_in_with_the_2_8_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in_flash_attn())
    attention._flash_attn.cache_clear()
    try:
        layout = DocumentLayout.from_offsets(LAYOUT)
        for k in (0, 3):
            inputs = random_inputs((k, 4, 2, 32), layout.num_rows, torch.float32)
            assert max(errors(inputs, layout, backend="flash_attn")) <= 1e-5
    finally:
        attention._flash_attn.cache_clear()


def test_torch_cuda_backend_fits_the_operators_schemas_and_shapes() -> None:
    """On meta tensors: the schemas of PyTorch's own operators and the shapes they promise, no numbers."""
    layout = DocumentLayout.from_offsets(LAYOUT, device="meta")
    inputs = [
        x.detach().to("meta").requires_grad_() for x in random_inputs((2, 4, 2, 64), 104, torch.bfloat16)
    ]
    out = unrolled_attention(*split(inputs), layout, backend="torch_cuda")
    assert out.shape == inputs[0].shape
    grads = torch.autograd.grad(out.sum(), inputs)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in inputs]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", ["flash_attn", "torch_cuda", "matmul"])
def test_cuda_backends_equal_the_dense_reference(backend: str) -> None:
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    layout = DocumentLayout.from_offsets(LAYOUT, device="cuda")
    for shape in SHAPES:
        inputs = random_inputs(shape, layout.num_rows, torch.bfloat16)
        out_error, grad_error = errors(
            [x.detach().cuda().requires_grad_() for x in inputs], layout, backend=backend
        )
        assert out_error <= 3e-2
        assert grad_error <= 2e-2
