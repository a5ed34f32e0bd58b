"""The template of Ray's distributed SGD of 2018, as it runs today.

Beside it are the two modules that it imports: sgd.py has DistributedSGD, test_model.py the model, which makes its own
mock images. Without `import ray` and `ray.init()` the workers are processes of this machine.

    python examples/distributed_sgd/template.py
"""

import argparse

import ray
from sgd import DistributedSGD
from test_model import TFBenchModel

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    ray.init()

    model_creator = lambda worker_idx, device_idx: TFBenchModel(batch=1, use_cpus=True)  # noqa: E731

    sgd = DistributedSGD(model_creator, num_workers=2, devices_per_worker=2, use_cpus=True)

    for _ in range(args.steps):
        loss = sgd.step()
        print("Current loss", loss)
