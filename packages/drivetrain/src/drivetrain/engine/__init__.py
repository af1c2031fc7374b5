"""The Drivetrain engine: configure, launch, train, checkpoint, observe."""
