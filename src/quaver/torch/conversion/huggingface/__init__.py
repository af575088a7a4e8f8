"""quaver.torch.conversion.huggingface"""
