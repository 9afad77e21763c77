import torch

torch.set_num_threads(1)  # two pytest workers on two cores
