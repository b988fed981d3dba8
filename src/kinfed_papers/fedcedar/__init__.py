"""FedCedar's ablations, which its Table 2 prints."""
