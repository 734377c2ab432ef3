"""The parts that every launch has. They name no feature; ``mlaunch.features`` lists them."""
