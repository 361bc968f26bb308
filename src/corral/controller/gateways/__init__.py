"""What gateways receive from the controller and report to it: the view, receipts, demand."""
