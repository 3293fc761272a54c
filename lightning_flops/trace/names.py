"""What the names in a torch trace say: the kind of an event, collectives, tensor cores, phases; from torch 1.8 on."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from lightning_flops.records import MARKS, marked_phase


class Kind(IntEnum):
    """What an event of a trace stands for."""

    OTHER = 0  # known, but in no table: overheads, marks repeated on the device's lanes
    PYTHON = 1  # a call of a Python function or of a module; in no table of time
    OPERATOR = 2
    ANNOTATION = 3  # a named scope on the host: ``record_function``, a profiler step, an optimizer step
    RUNTIME = 4  # a call into the device's runtime or driver
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7


_RUNTIMES = ("", "cuda_", "hip_", "xpu_", "mtia_", "glow_", "privateuse1_")
_CATEGORIES = {
    Kind.OPERATOR: "cpu_op operator",
    Kind.ANNOTATION: "user_annotation",
    Kind.PYTHON: "python_function",
    Kind.KERNEL: "kernel mtia_ccp_events",
    Kind.MEMCPY: "gpu_memcpy memcpy",
    Kind.MEMSET: "gpu_memset memset",
    Kind.OTHER: "gpu_user_annotation overhead cuda_sync cuda_profiler_range collective_comm mtia_insight "
    "external_correlation",
    Kind.RUNTIME: " ".join(f"{api}{layer}" for api in _RUNTIMES for layer in ("runtime", "driver")),
}
# Lower-case category to kind; a category that is not here is not torch.profiler's, and its events are left out.
KIND_OF_CATEGORY = {category: kind for kind, words in _CATEGORIES.items() for category in words.split()}

_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})$")
_HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):(\w+)")
_STARTS_COLLECTIVE = re.compile(r"[nrx]ccl:_?(\w+)")
# Scopes that torch itself opens, up to 1.8 as operators; every other scope, but for marks, is the user's.
_OF_TORCH = re.compile(r"ProfilerStep#|enumerate\(|Optimizer\.(step|zero_grad)#|(gloo|nccl|mpi|ucc|xccl):")
_PHASES = {
    "data loader": re.compile(r"enumerate\((DataLoader|DataPipe)\)#"),
    "forward": re.compile(r"(.*[./ \]#])?(forward|training_step)[# ]*$"),
    "backward": re.compile(r"(.*[./ \]#])?backward[# ]*$"),
    "optimizer": re.compile(r"Optimizer\.step#"),
}
_MARKED_PHASES = {"data_wait": "data loader", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}

_DEVICE_COLLECTIVE = re.compile(r"[nr]ccl|oneccl|mscclpp|cross_device_reduce|(one|two)_shot_all_r|multimem_all", re.I)
_COLLECTIVE_OF_KERNEL = re.compile(r"(?:nccl|rccl)(?:Dev)?(?:Kernel_?)?([A-Z][A-Za-z]*)", re.I)
_STARTS_OR_WAITS = re.compile(r"_?c10d(_functional\w*)?::|autograd::engine::|torch::autograd::")
_COMPILED = ("CompiledFunction", "Torch-Compiled Region")  # scopes of torch.compile, whose loops are no operators

# Patterns of names that NVIDIA's and PyTorch's libraries give kernels built on tensor-core instructions.
_TENSOR_CORE = re.compile(
    r"[hi]mma|gmma|[hi]884|[hi]1688|16816|s161616|(?<![a-z])tensorop(?![a-z])|mmatensorop|_tensor\d|xmma(?!\w*_[fd]fma)|nvjet|s1688|tf32(?!x?_?simt)"
    r"|flash_(fwd|bwd)|pytorch_flash|fmha_v2|fmha_cutlass[fb]_(f16|bf16).*_sm(7[05]|8\d|9\d|1\d\d)"
    r"|cudnn_generated_fort_native_sdpa|cutlass3x_sm(90|1\d\d)|cutlass_\d+_wmma|device_kernel.*sm(90|100)",
    re.I,
)

# Whether an operator is one of matrix products, convolutions, attention or recurrent layers.
may_use_tensor_cores = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|_addmm_activation|_scaled_mm|_grouped_mm|matmul|linear|einsum|addmv|mv|dot"
    r"|_?convolution\w*|conv(_transpose)?[123]d|(cudnn|miopen)_convolution\w*"
    r"|_?(scaled_dot_product|flash|efficient|cudnn)_\w*attention\w*|_(cudnn|thnn_fused)_\w*rnn\w*|_cudnn_rnn\w*)$"
).match

# Kernels that run whatever their template argument names.
_LAUNCHERS = frozenset(("Kernel", "Kernel2", "kernel", "device_kernel", "kentry", "cutlass_kernel"))

_MANGLED = re.compile(r"_ZN?[KVr]*(?=\d)")
_LENGTH = re.compile(r"\d+")
_TEMPLATE = re.compile(r"<[^<>]*>")
# Inductor's pointwise kernels and reductions, whose names list what they were fused from.
_POINTWISE = re.compile(r"triton_(poi|per|red|for|split_scan)_")

# How names of kernels begin that multiply matrices, convolve or attend: libraries', and what people call theirs.
_MULTIPLIES = re.compile(
    r"(void |_ZN\d+)?(cutlass|cublas)|nvjet_|fmha|flash_(fwd|bwd)|sm\d+_xmma|cudnn_generated_fort_native_sdpa"
    r"|(cudnn_|infer_|train_)*(maxwell|volta|turing|ampere|hopper)_\w*(gemm|cudnn|winograd)"
    r"|[hs]?(\d{3,6})?gem[mv]|.* internal::gemvx::kernel|[dw]grad(\d|_alg|_engine)|winograd[FW]"
    r"|(pre|im|ex)\w*_convolve|(gen_|naive_)?conv(\dd?)?_"
    r"|_?((kernel|flash|paged|unified)_)*att(entio)?n_|Batch(Decode|Prefill)With"  # as people write them
    r"|_?b?mm_|_?matmul_|fused_moe|chunk_(scan|state|fwd|bwd)|[Mm]arlin|triton_tem_"
    r"|Cijk_|igemm_|miopenSp3AsmConv|kernel_\w*(gemm|conv)\w*_xdl|bwd_kernel_d[kqv]"  # AMD's
)

# Whether a device, or a call into a runtime, is AMD's or Intel's, whose kernels have other names than NVIDIA's.
is_of_another_vendor = re.compile(r"(hip|ze|ur)[A-Z]|.*(?i:AMD|Radeon|Instinct|gfx\d|Intel)").match


def step_number(name: str) -> int | None:
    """The number of the profiler step that a scope's name marks; None for any other name."""
    return int(match[1]) if (match := _STEP.match(name)) else None


def phase_of(name: str) -> str | None:
    """The phase of a step that a scope of this name is: ``data loader``, ``forward``, ``backward`` or ``optimizer``."""
    if name.startswith(MARKS):
        return _MARKED_PHASES.get(marked_phase(name) or "")
    return next((phase for phase, pattern in _PHASES.items() if pattern.match(name)), None)


def is_users_scope(name: str) -> bool:
    """Whether a scope of this name is neither torch's nor a mark of this package; an operator, that it is no scope."""
    return not name.startswith(MARKS) and _OF_TORCH.match(name) is None


def host_collective(name: str) -> str | None:
    """The collective that a host scope performs itself (``gloo:all_reduce``; ``nccl:`` only launches): its name."""
    return match[2] if (match := _HOST_COLLECTIVE.match(name)) else None


def scope_of_collective(name: str) -> str | None:
    """The collective that a scope of torch's starts on a device: ``all_to_all`` for ``nccl:all_to_all``."""
    return match[1] if (match := _STARTS_COLLECTIVE.match(name)) else None


@lru_cache(maxsize=4096)
def own_name(kernel: str) -> str:
    """The name of the function alone: no return type, namespaces, template arguments (but a launcher's), parameters."""
    if mangled := _MANGLED.match(kernel):
        place, found = mangled.end(), ""
        while length := _LENGTH.match(kernel, place):
            place = length.end() + int(length[0])
            found = kernel[length.end() : place]
        return kernel if found in _LAUNCHERS else found
    name = own = kernel.replace("(anonymous namespace)", "")
    while own != (own := _TEMPLATE.sub("", own)):
        pass
    own = own.partition("(")[0].strip().rpartition(" ")[2].rpartition("::")[2]
    return name if own in _LAUNCHERS else own


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel of this name communicates with other ranks."""
    return _DEVICE_COLLECTIVE.search(own_name(name)) is not None


def collective_of(name: str) -> str:
    """The collective that the name of a host scope or kernel says: ``allreduce`` for ``ncclDevKernel_AllReduce_…``."""
    match = _COLLECTIVE_OF_KERNEL.search(name)
    if (of_host := host_collective(name)) or not match:
        return of_host or own_name(name)
    word = re.sub(r"(Ring|Tree|CollNet|NVLS|PAT|Sum|Max|Min|Prod).*", "", match[1])
    return (word or match[1]).lower()


def computes_on_host(operator: str) -> bool:
    """Whether an operator of this name computes, and does not start communication, wait for it or run any Python."""
    # A node of autograd, or a Function of the user's, runs operators that compute, and hooks that may well wait.
    return ("::" in operator and _STARTS_OR_WAITS.match(operator) is None) or operator.startswith(_COMPILED)


def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel's name says that it runs on tensor cores; one that Triton made has no name that says so."""
    return _POINTWISE.match(name) is None and _TENSOR_CORE.search(own_name(name)) is not None


def multiplies(kernel: str) -> bool:
    """Whether a kernel's name says that it is a matrix product, a convolution or attention."""
    by_name = _POINTWISE.match(kernel) is None and _MULTIPLIES.match(own_name(kernel)) is not None
    return by_name or uses_tensor_cores(kernel)
