"""What every launch has. It names no feature; ``mlaunch.features`` lists them."""
