"""The least that a launched script can do: join gloo, meet, and leave."""

import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
