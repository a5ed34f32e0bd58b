"""Run a job with Paceline on a Ray that lives and ends with this script: `python with_paceline_on_ray.py SPEC`."""

import json
import sys

import paceline
from benchmarks.local_ray import local_ray
from benchmarks.scripts.with_paceline import main

if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    with local_ray(spec.get("num_cpus", 2)):
        main(spec, paceline.RayEngine(spare_workers=spec.get("spare_workers", 0)))
