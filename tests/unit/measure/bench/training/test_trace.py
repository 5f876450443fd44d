"""Traces: the class of a kernel by its name, launches and waits of the host, and time that belongs to a range."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.measure.bench.training.trace import OPTIMIZER, WORK, Trace, kernel_class, read_events

# as the profiler writes them on Hopper, template arguments shortened
KERNELS = {
    "matmul": [
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
        "triton_tem_fused_mm_5",
        "aten::_scaled_mm",
    ],
    "attention": [
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
    ],
    "cast": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(TensorIteratorBase&)>",
        "triton_poi_fused__to_copy_2",
        "quantize_tiles",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>",
        "triton_red_fused_add_mean_mul_pow_rsqrt_1",
        "_squares",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "triton_poi_fused_add_mul_silu_4",
    ],
    "optimizer": ["adamw", "decide", "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)"],
    "other": ["my_kernel"],
}


def test_the_class_of_a_kernel() -> None:
    assert {key: [kernel_class(name) for name in names] for key, names in KERNELS.items()} == {
        key: [key] * len(names) for key, names in KERNELS.items()
    }


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
    expected = {"matmul": 0.03, "elementwise": 0.03, "memcpy": 0.01, "optimizer": 0.06, "communication": 0.02}
    assert ms == pytest.approx(expected)
    assert trace.wall_ms == pytest.approx(0.17)  # 10 to 180, the end of the last kernel
    assert trace.busy_ms == pytest.approx(0.05 + 0.01 + 0.08)  # the two first kernels overlap
    assert trace.idle_ms == pytest.approx(0.03)
    assert [row["name"] for row in trace.top(1)] == ["triton_red_fused_mul_0"]
    phase = trace.within(OPTIMIZER)
    assert (phase.num_launches, phase.num_copies, phase.synchronizations) == (2, 0, {})
    assert phase.busy_ms == pytest.approx(0.08)
    # a call that runtime and driver list counts once
    both = [event(WORK, "user_annotation", 0, 9), event("k", "kernel", 5, 1, 7)]
    both += [event("cudaLaunchKernel", "cuda_runtime", 1, 2, 7), event("cuLaunchKernel", "cuda_driver", 1.5, 1, 7)]
    assert Trace(read_events({"traceEvents": both})).num_launches == 1
