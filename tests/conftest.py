import torch

torch.set_num_threads(1)  # pytest runs one worker per core; more threads would slow all of them down
