-- version
SELECT current_setting('server_version_num')::int/100;
-- timescaledb
SELECT extversion FROM pg_extension WHERE extname = 'timescaledb';
-- tables
select quote_ident(table_name) as "table" from information_schema.tables
    where quote_ident(table_schema) not in ('information_schema',
                             'pg_catalog',
                             '_timescaledb_cache',
                             '_timescaledb_catalog',
                             '_timescaledb_internal',
                             '_timescaledb_config',
                             'timescaledb_information',
                             'timescaledb_experimental')
      and 
          quote_ident(table_schema) IN (
          SELECT
            CASE WHEN trim(s[i]) = '"$user"' THEN user ELSE trim(s[i]) END
          FROM
            generate_series(
              array_lower(string_to_array(current_setting('search_path'),','),1),
              array_upper(string_to_array(current_setting('search_path'),','),1)
            ) as i,
            string_to_array(current_setting('search_path'),',') s
          );
-- columns
select quote_ident(column_name) as "column", data_type as "type"
    from information_schema.columns
    where quote_ident(table_name) = 'alloc_events';
-- time series
SELECT floor(extract(epoch from ts)/60)*60 AS "time", sum(bytes) AS "value" FROM alloc_events WHERE ts BETWEEN '2026-11-29T13:00:00Z' AND '2026-11-29T14:00:00Z' GROUP BY 1 ORDER BY 1;
-- table of rows
SELECT ts AS "time", op, bytes FROM alloc_events WHERE ts BETWEEN '2026-11-29T13:00:00Z' AND '2026-11-29T14:00:00Z' ORDER BY ts LIMIT 50;
-- variable
SELECT DISTINCT host FROM alloc_events ORDER BY host;
