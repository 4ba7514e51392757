import modelwright_federated as modelwright_federated  # before a test imports Flower, which reports what runs otherwise
