-- Models: registering, replacing, granting, dropping.
\set SHOW_CONTEXT never
CREATE ROLE regress_tensile_owner IN ROLE tensile_user;
CREATE ROLE regress_tensile_user IN ROLE tensile_user;
CREATE ROLE regress_tensile_nobody;

-- Roles outside tensile_user may use nothing
SET ROLE regress_tensile_nobody;
SELECT register_model('late', '{"type": "mlp"}');
SELECT predict('late', ARRAY[1.0]);
SELECT count(*) FROM tensile.models;

-- Members do not use the tables behind the views
SET ROLE regress_tensile_owner;
SELECT count(*) FROM tensile_internal.models;
SELECT register_model('late', '{"type": "mlp", "hidden": [8]}', 'late arrivals') AS late \gset
SELECT model, owner, architecture, description, deployed_version FROM tensile.models;
SELECT register_model('late', '{"type": "mlp"}');
SELECT register_model('late', '{"type": "mlp"}', replace => true) = :late AS same_model;
SELECT register_model('', '{"type": "mlp"}');
SELECT register_model(NULL, '{"type": "mlp"}');
SELECT register_model('m', '[]');
SELECT register_model('m', '{"type": "mpl"}');
SELECT register_model('m', '{"type": "mlp", "hiden": [8]}');
SELECT register_model('m', '{"type": "mlp", "hidden": [8, 0]}');
SELECT register_model('m', '{"type": "cnn", "kernel": 2}');
SELECT register_model('m', '{"type": "transformer", "dim": 10, "heads": 4}');
SELECT register_model('m', '{"type": "python", "source": "def build(n_inputs, n_outputs): ..."}');
SELECT deploy_model('late', 1);
SELECT deploy_model('later', 1);

-- Other roles see and use a model only with a grant
SET ROLE regress_tensile_user;
SELECT count(*) FROM tensile.models;
SELECT register_model('late', '{"type": "mlp"}', replace => true);
SELECT drop_model('late');
SELECT predict('late', ARRAY[1.0]);
SELECT train_model('late', 'VALUES (1, 2)', 'column2');
SET ROLE regress_tensile_owner;
SELECT grant_model('late', 'regress_tensile_user');
SELECT grant_model('late', 'regress_tensile_user', 'trian');
SELECT grant_model('late', 'regress_tensile_anybody');
SELECT model, grantee, privilege, grantor FROM tensile.model_grants;
SET ROLE regress_tensile_user;
SELECT model FROM tensile.models;
SELECT predict('late', ARRAY[1.0]);
SELECT drop_model('late');
SET ROLE regress_tensile_owner;
SELECT revoke_model('late', 'regress_tensile_user');
SELECT set_model_owner('late', 'regress_tensile_user');
RESET ROLE;
SELECT set_model_owner('late', NULL);
SELECT set_model_owner('late', 'regress_tensile_user');
SELECT model, owner FROM tensile.models;
SET ROLE regress_tensile_user;
SELECT drop_model('late');
SELECT count(*) FROM tensile.models;
RESET ROLE;
DROP ROLE regress_tensile_owner, regress_tensile_user, regress_tensile_nobody;
