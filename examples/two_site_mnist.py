"""Two sites train MNISTNet on handwritten digits, by rank-dAD, in a Catalyst experiment.

    python examples/two_site_mnist.py                       both sites on this machine
    python examples/two_site_mnist.py --compare             dsgd, dad and rankdad, with a table and a picture
    python examples/two_site_mnist.py --trainer lightning   in Lightning, or in a plain loop

On two machines, site 0 at 10.0.0.1:

    python examples/two_site_mnist.py --rank 0 --dist-url tcp://10.0.0.1:8998
    python examples/two_site_mnist.py --rank 1 --dist-url tcp://10.0.0.1:8998

Between institutions, over the hub of a project, each site with its kit:

    python examples/two_site_mnist.py --kit kits/a
    python examples/two_site_mnist.py --kit kits/a --min-sites 1

With --min-sites 1 training goes on without a site that leaves, and one that is started again returns.
"""

from __future__ import annotations

import sys

from two_sites import Task, main

from dadplug.models import build_for

TASK = Task(
    title="MNISTNet",
    build=lambda data, arguments: build_for(data, "MNISTNet"),
    epochs={"digits": 10, "mnist": 5},
    defaults={"sync_batchnorm": True},  # MNISTNet has batch normalisation, and a site may lack classes
)

if __name__ == "__main__":
    sys.exit(main(TASK, sys.argv[1:], __doc__))
