"""Traces: the class of a kernel by its name, launches and waits of the host, and time that belongs to a range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import record_function

from dtrain.errors import AcceptError
from dtrain.tools.accept.trace import OPTIMIZER, WORK, Trace, kernel_class, read_events, record_trace

# as the profiler writes them on Hopper, template arguments shortened
KERNELS = {
    "matmul": [
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
        "triton_tem_fused_mm_5",
        "aten::addmm",
        "aten::_scaled_mm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    ],
    "cast": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(TensorIteratorBase&)>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>",
        "void at::native::unrolled_elementwise_kernel<at::native::float8_copy_kernel_cuda(TensorIteratorBase&)>",
        "triton_poi_fused__to_copy_2",
        "quantize_tiles",
        "_cast",
        "_transpose",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "triton_red_fused_add_mean_mul_pow_rsqrt_1",
        "triton_per_fused_sum_3",
        "_squares",
        "_first_nonfinite",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<BinaryFunctor<mul>>>",
        "triton_poi_fused_add_mul_silu_4",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4, 64, 64>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, normal_kernel>",
    ],
    "optimizer": ["adamw", "decide", "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)"],
    "other": ["my_kernel"],
}


@pytest.mark.parametrize(("expected", "name"), [(key, name) for key, names in KERNELS.items() for name in names])
def test_the_class_of_a_kernel(expected: str, name: str) -> None:
    assert kernel_class(name) == expected


def event(name: str, category: str, start: float, duration: float, correlation: int | None = None) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 1, "args": arguments,
    }  # fmt: skip


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        event("cudaDeviceSynchronize", "cuda_runtime", 1, 5),  # before the work
        event(WORK, "user_annotation", 10, 100),
        event(WORK, "gpu_user_annotation", 10, 300),
        event("cudaLaunchKernel", "cuda_runtime", 12, 1, 1),
        event("nvjet_sm90_tst_128x256", "kernel", 20, 30, 1),
        event("cuLaunchKernelEx", "cuda_driver", 14, 1, 2),
        event("triton_poi_fused_add_0", "kernel", 40, 30, 2),  # on another stream, beside the matmul
        event("aten::item", "cpu_op", 30, 10),
        event("aten::_local_scalar_dense", "cpu_op", 31, 8),
        event("cudaMemcpyAsync", "cuda_runtime", 32, 1, 3),
        event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 80, 10, 3),
        event("cudaStreamSynchronize", "cuda_runtime", 34, 4),
        event(OPTIMIZER, "user_annotation", 60, 40),
        event("cudaLaunchKernelExC", "cuda_runtime", 62, 1, 4),
        event("triton_red_fused_mul_0", "kernel", 100, 60, 4),
        event("cudaLaunchKernel", "cuda_runtime", 64, 1, 5),
        event("ncclDevKernel_AllGather", "kernel", 160, 20, 5),
        event("cudaLaunchKernel", "cuda_runtime", 120, 1, 6),  # after the work
        event("nvjet_late", "kernel", 190, 100, 6),
    ]
}


def test_work_belongs_to_the_range_that_launched_it() -> None:
    trace = Trace(read_events(TRACE))
    assert trace.num_launches == 4
    assert trace.num_copies == 1
    assert trace.synchronizations == {"cudaStreamSynchronize": 1, "Memcpy DtoH (Device -> Pageable)": 1}
    ms = {name: value for name, value in trace.ms_by_class().items() if value}
    assert ms == pytest.approx(
        {"matmul": 0.03, "elementwise": 0.03, "memcpy": 0.01, "optimizer": 0.06, "communication": 0.02}
    )
    assert trace.wall_ms == pytest.approx(0.17)  # 10 to 180, the end of the last kernel
    assert trace.busy_ms == pytest.approx(0.05 + 0.01 + 0.08)  # the two first kernels overlap
    assert trace.idle_ms == pytest.approx(0.03)
    assert [row["name"] for row in trace.top(1)] == ["triton_red_fused_mul_0"]


def test_the_optimizer_phase_alone() -> None:
    phase = Trace(read_events(TRACE)).within(OPTIMIZER)
    assert (phase.num_launches, phase.num_copies, phase.synchronizations) == (2, 0, {})
    assert phase.busy_ms == pytest.approx(0.08)


def test_a_call_listed_by_runtime_and_driver_counts_once() -> None:
    both = [event(WORK, "user_annotation", 0, 9), event("k", "kernel", 5, 1, 7)]
    both += [event("cudaLaunchKernel", "cuda_runtime", 1, 2, 7), event("cuLaunchKernel", "cuda_driver", 1.5, 1, 7)]
    assert Trace(read_events({"traceEvents": both})).num_launches == 1


def test_a_trace_of_this_cpu() -> None:
    x = torch.randn(64, 64)

    def work() -> None:
        y = x @ x
        with record_function(OPTIMIZER):
            y.view(-1).neg_()
        assert y[0, 0].item() is not None

    trace = record_trace(work, torch.device("cpu"))
    assert trace.num_launches == 3  # the product, the negation, and the read of an element
    assert trace.synchronizations == {".item()": 1}
    ms = trace.ms_by_class()
    assert ms["matmul"] > 0
    assert ms["optimizer"] > 0
    assert 0 < trace.busy_ms <= trace.wall_ms
    assert trace.within(OPTIMIZER).num_launches == 1


def test_a_profiler_that_records_no_kernel_of_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    with pytest.raises(AcceptError, match="no kernel of the GPU"):
        record_trace(lambda: None, torch.device("cuda", 0))
