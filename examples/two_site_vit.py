"""Two sites train a vision transformer with Linformer's attention, by rank-dAD, in Catalyst or in Lightning.

    python examples/two_site_vit.py                                 digits as images, both sites on this machine
    python examples/two_site_vit.py --trainer lightning
    python examples/two_site_vit.py --dataset dogsvscats --data-dir DIR/train.zip --compare
    python examples/two_site_vit.py --size full …                   224 pixels, depth 12

On two machines, site 0 at 10.0.0.1:

    python examples/two_site_vit.py --rank 0 --dist-url tcp://10.0.0.1:8998
    python examples/two_site_vit.py --rank 1 --dist-url tcp://10.0.0.1:8998

Between institutions, over the hub of a project, each site with its kit:

    python examples/two_site_vit.py --kit kits/a
    python examples/two_site_vit.py --kit kits/a --min-sites 1

With --min-sites 1 training goes on without a site that leaves, and one that is started again returns.
"""

from __future__ import annotations

import argparse
import sys

from torch import nn
from two_sites import Task, main

from dadplug.data import DataPair
from dadplug.models import build_for


def build(data: DataPair, arguments: argparse.Namespace) -> tuple[nn.Module, DataPair]:
    """Build the ViT; for digits, the small one has an image size of 28 pixels and patches of 4."""
    if arguments.size == "full":
        return build_for(data, "vit")
    own = {"image_size": 28, "patch_size": 4} if data.train.shape[0] == 1 else {}
    return build_for(data, "vit-small", **own)


TASK = Task(
    title="ViT",
    build=build,
    epochs={"digits": 8, "dogsvscats": 10},
    lr=5e-4,
    defaults={"rank": 4},
    add_flags=lambda parser: parser.add_argument(
        "--size", choices=("small", "full"), default="small", help="full: 224 pixels, depth 12 (default: small)"
    ),
)

if __name__ == "__main__":
    sys.exit(main(TASK, sys.argv[1:], __doc__))
