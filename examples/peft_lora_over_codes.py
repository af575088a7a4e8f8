"""PEFT: train LoRA over weights stored in four bits, then merge. Needs pip install -e '.[integrations]'."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import quaver.torch as qt
from quaver.integrations.peft import over_codes

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128))
print(str(qt.quantize_weights(model, "nvfp4")).splitlines()[0])

lora = get_peft_model(model, over_codes(LoraConfig(r=8, target_modules="all-linear")))
optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], 1e-2)
x = torch.randint(128, (4, 32))
losses = []
for _ in range(20):
    loss = lora(input_ids=x, labels=x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}; {sum(p.numel() for p in optimizer.param_groups[0]['params'])} trained")

merged = lora.merge_and_unload()
loss = merged(input_ids=x, labels=x).loss
print(f"merged, without the recipe: {loss.item():.2f}, {merged.model.layers[0].mlp.up_proj.weight.dtype}")
