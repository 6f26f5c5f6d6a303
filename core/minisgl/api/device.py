"""The torch part of the public interface for plugins."""

from minisgl.runtime.attention import AttentionBackend, AttnContext, AttnFacts, GraphSupport, KVSpec
from minisgl.runtime.batch import BatchView, ForwardBatch, OpTable
from minisgl.runtime.comm import Comm, NoComm, TorchComm
from minisgl.runtime.kernels import Ops, OpsContext
from minisgl.runtime.logits import BANNED, FOREVER, LogitsContext, LogitsProcessor
from minisgl.runtime.model import Model, ModelContext, TpInfo
from minisgl.runtime.profile import StepRanges
from minisgl.runtime.quant import Apply, QuantContext, QuantMethod, Turn
from minisgl.runtime.sampling import Sampler, SamplerContext, SampleRows
from minisgl.runtime.staging import Ring, Uploads
from minisgl.runtime.worker import Pending, Worker

__all__ = [
    "BANNED", "FOREVER", "Apply", "AttentionBackend", "AttnContext", "AttnFacts", "BatchView", "Comm", "ForwardBatch", "GraphSupport", "KVSpec", "LogitsContext", "LogitsProcessor", "Model", "ModelContext", "NoComm", "OpTable",
    "Ops", "OpsContext", "Pending", "QuantContext", "QuantMethod", "Ring", "SampleRows", "Sampler", "SamplerContext", "StepRanges", "TorchComm", "TpInfo", "Turn", "Uploads", "Worker",
]  # fmt: skip
