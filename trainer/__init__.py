"""Training of clip encoders: pool, pretraining, fine-tuning, export and the gate.

Runs by itself (`python -m trainer`) or as the stages of a `syncd` worker; imports `protocol`,
never `syncd`. What needs torch is imported by the commands that need it, not from here.
"""
