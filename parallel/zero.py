"""What Megatron-FSDP (ZeRO-2 and ZeRO-3 here) lacks as shipped: pipeline stages, and FP16.

Both gaps are in Megatron-core 0.19.2 and each is closed by the smallest override that works.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import FSDPDistributedIndex
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed import DeviceMesh


class StageFSDP(FullyShardedDataParallel):
    """Megatron-FSDP over the ranks of one pipeline stage.

    The adapter assumes world = dp·tp and refuses anything else. A stage's ranks form the same [dp, tp] grid, only
    shifted: Megatron numbers ranks tp fastest, then cp and dp, then pp.
    """

    def _init_dist_index(self, pg_collection):
        dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        tp = parallel_state.get_tensor_model_parallel_group()
        per_stage = dp_cp.size() * tp.size()
        first = parallel_state.get_pipeline_model_parallel_rank() * per_stage
        mesh = torch.arange(first, first + per_stage).view(dp_cp.size(), tp.size())
        row = mesh[:, tp.rank()].tolist(), mesh[dp_cp.rank()].tolist()
        assert row == (dist.get_process_group_ranks(dp_cp), dist.get_process_group_ranks(tp)), (mesh, row)
        self.tp_group = tp
        return FSDPDistributedIndex(
            device_mesh=DeviceMesh.from_group(
                [dp_cp, tp], device_type="cuda", mesh=mesh.tolist(), mesh_dim_names=["dp_cp", "tp"]
            ),
            dp_shard_dim="dp_cp",
            tp_dim="tp",
        )


def _gradients_to_unscale(self):
    """This rank's gradients as plain tensors; a parameter of which it owns no row has none."""
    parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [getattr(p.grad, "_local_tensor", p.grad).data for p in parameters]


def allow_fp16() -> None:
    """Let the loss scaler unscale sharded gradients, and skip parameters that live on other ranks."""
    DistributedOptimizer._collect_main_grad_data_for_unscaling = _gradients_to_unscale
