"""Text to token ids and back, and chat messages to a prompt.

Runs in the process that talks to the user, so it must not know the model, the engine or torch.
"""
