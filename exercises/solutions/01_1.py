def rms_norm(x, weight, eps):
    x32 = x.float()
    normed = x32 * (x32.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return normed.to(x.dtype) * weight
