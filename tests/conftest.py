import torch

torch.set_num_threads(1)      # the tests' tensors are small: threads would only wait for one another
