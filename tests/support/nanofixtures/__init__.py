"""Models and tokenizers small enough that every test can afford the real engine."""
