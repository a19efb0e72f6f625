"""What torch needs beyond values: autograd, forward mode, transforms.

Imported only when a tensor arrives that needs it; importing arraylogchain does not import torch.
"""
