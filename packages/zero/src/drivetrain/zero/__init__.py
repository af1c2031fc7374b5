"""ZeRO stages 0 to 3 as policies over one core."""
