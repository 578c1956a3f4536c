"""One rank of the tests of attaching: settles what is run, then checks that all ranks really meet."""

import json
import os
import sys

from parallel import attach, rank_process


def main() -> None:
    run_dir = attach.attach(sys.argv[1:])
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    seen = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    seen |= {"sum": total.item(), "threads": torch.get_num_threads(), "gloo": os.environ.get("GLOO_SOCKET_IFNAME")}
    (run_dir / f"seen{seen['RANK']}.json").write_text(json.dumps(seen))
    print(f"this is rank {seen['RANK']}", flush=True)
    dist.destroy_process_group()


assert attach.attached()
rank_process.run(main)
