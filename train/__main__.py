"""`accelerate launch -m headsmith.train RECIPE [key.sub=value ...]`: one process of a training."""

import sys

from headsmith.cli import run
from headsmith.train.cli import train

if __name__ == "__main__":
    sys.exit(run(train, name="headsmith.train"))
