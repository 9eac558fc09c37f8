"""Pictures and sounds: preprocessing, the configuration of their encoders, and the encoders as ops."""
