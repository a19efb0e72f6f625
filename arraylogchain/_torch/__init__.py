"""What torch needs beyond values: autograd, transforms, compilation.

Imported only when a tensor arrives that needs it; importing arraylogchain does not import torch.
"""
