"""One thread a worker: workers that each want all cores wait for one another more than they compute."""

import torch

torch.set_num_threads(1)
