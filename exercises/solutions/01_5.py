def kv_bytes_per_token(config, bytes_per_number):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_number


def decode_side(config, num_weights, batch, context, bytes_per_number, ridge):
    operations = 2 * num_weights * batch
    cache = batch * context * kv_bytes_per_token(config, bytes_per_number)
    moved = num_weights * bytes_per_number + cache
    return "memory" if operations / moved < ridge else "compute"
