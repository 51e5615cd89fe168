-- completion of a table
SELECT c.relname, NULL::pg_catalog.text
FROM pg_catalog.pg_class c
WHERE c.relkind IN ('r', 'S', 'v', 'm', 'f', 'p') AND (c.relname) LIKE 'alloc%' AND pg_catalog.pg_table_is_visible(c.oid) AND c.relnamespace <> (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'pg_catalog')
UNION ALL
SELECT NULL::pg_catalog.text, n.nspname
FROM pg_catalog.pg_namespace n
WHERE (n.nspname) LIKE 'alloc%' AND n.nspname NOT LIKE E'pg\\_%'
LIMIT 1000;
-- completion of a column
SELECT attname FROM pg_catalog.pg_attribute a, pg_catalog.pg_class c WHERE c.oid = a.attrelid AND a.attnum > 0 AND NOT a.attisdropped AND (attname) LIKE 'byt%' AND (c.relname) = ('alloc_events') AND pg_catalog.pg_table_is_visible(c.oid) LIMIT 1000;
-- completion of a schema
SELECT n.nspname FROM pg_catalog.pg_namespace n WHERE (n.nspname) LIKE 'pub%' LIMIT 1000;
