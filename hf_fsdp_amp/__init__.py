"""Mixed precision that means the same thing under FSDP1, FSDP2, DDP and one device in the HF Trainer."""
